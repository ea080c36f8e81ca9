// Coded indices (codes/indices.py, Elias-Fano), and values gathered from and scattered to a tensor.
#pragma once

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "bits.h"
#include "random.h"

namespace kernels {

// Sizes of the code of k ascending indices below n, 1 <= k <= n.
struct IndexCode {
    size_t n, k;
    int low = 0;  // bits of each index that are packed as they are

    IndexCode(size_t n, size_t k) : n(n), k(k) {
        while (n / k >> (low + 1)) ++low;
    }
    size_t bitmap_bits() const { return k + ((n - 1) >> low); }
    size_t high_nbytes() const { return (bitmap_bits() + 7) / 8; }
    size_t low_nbytes() const { return packed_nbytes(k, low); }
};

inline void encode_indices(const IndexCode& code, const int32_t* indices, uint8_t* high, uint8_t* low) {
    std::memset(high, 0, code.high_nbytes());
    std::vector<uint32_t> rest(code.low ? code.k : 0);
    const uint32_t mask = (1u << code.low) - 1;
    for (size_t j = 0; j < code.k; ++j) {
        const size_t place = (static_cast<uint32_t>(indices[j]) >> code.low) + j;
        high[place / 8] |= static_cast<uint8_t>(1u << place % 8);
        if (code.low) rest[j] = static_cast<uint32_t>(indices[j]) & mask;
    }
    if (code.low) pack_wide(rest.data(), code.k, code.low, low);
}

// Not trusted: throws unless there are k ones and every index is below n.
inline std::vector<int32_t> decode_indices(const IndexCode& code, const uint8_t* high, const uint8_t* low) {
    std::vector<int32_t> indices(code.k);
    std::vector<uint32_t> rest(code.k);
    if (code.low) unpack_wide(low, code.k, code.low, rest.data());
    const size_t bits = code.bitmap_bits();
    size_t found = 0;
    for (size_t byte = 0; byte < code.high_nbytes(); ++byte) {
        uint32_t ones = high[byte];
        if (8 * byte + 8 > bits) ones &= 0xFFu >> (8 * byte + 8 - bits);
        for (; ones; ones &= ones - 1) {
            if (found < code.k) {
                const size_t place = 8 * byte + static_cast<size_t>(__builtin_ctz(ones));
                const uint64_t index = static_cast<uint64_t>(place - found) << code.low | rest[found];
                if (index >= code.n)
                    throw std::out_of_range("index outside 0.." + std::to_string(code.n - 1) + " in a sparse payload");
                indices[found] = static_cast<int32_t>(index);
            }
            ++found;
        }
    }
    if (found != code.k)
        throw std::out_of_range(std::to_string(found) + " coded indices in a payload that has " +
                                std::to_string(code.k));
    return indices;
}

inline void check_indices(const int32_t* indices, size_t k, size_t n) {
    for (size_t j = 0; j < k; ++j)
        if (indices[j] < 0 || static_cast<size_t>(indices[j]) >= n)
            throw std::out_of_range("index outside 0.." + std::to_string(n - 1) + " in a sparse payload");
}

// k distinct positions below n, one of each stretch, rotated at random (rng.sample).
inline void sample(const Random& random, size_t n, size_t k, int32_t* places) {
    const uint32_t length = static_cast<uint32_t>(n / k), longer = static_cast<uint32_t>(n % k);
    const int64_t rotation = static_cast<int64_t>(n) - (random.bits(static_cast<uint32_t>(k)) >> 1) % n;
    int64_t start = 0;
    for (uint32_t j = 0; j < k; ++j) {
        const uint32_t own = length + (j < longer);
        int64_t place = start + (random.bits(j) >> 1) % own - rotation;
        places[j] = static_cast<int32_t>(place < 0 ? place + static_cast<int64_t>(n) : place);
        start += own;
    }
}

inline void gather(const Source& source, const int32_t* indices, size_t k, float* values) {
    constexpr size_t AHEAD = 32;
    for (size_t j = 0; j < k; ++j) {
        if (j + AHEAD < k) {
            __builtin_prefetch(source.grad + indices[j + AHEAD]);
            if (source.residual) __builtin_prefetch(source.residual + indices[j + AHEAD]);
        }
        values[j] = source.at(static_cast<size_t>(indices[j]));
    }
}

// An accumulator's entries; checked indices, values multiplied by `by` first. It takes an index any number of times.
inline void accumulate(const Sink& sink, size_t n, const int32_t* indices, const float* values, size_t k, float by,
                       int threads) {
    for (size_t j = 0; j < k; ++j) sink.target[indices[j]] += by == 1.0f ? values[j] : values[j] * by;
    if (sink.scale == 1.0f) return;
    parallel(n, n, threads, LANES, [&](size_t first, size_t last) {
        for (size_t i = first; i < last; ++i) sink.target[i] /= sink.scale;
    });
}

// The same entries with ascending indices. Ours ascend, or start somewhere in the middle (sample).
struct Ascending {
    std::vector<int32_t> indices;
    std::vector<float> values;

    // Leaves them as they are, and this empty, if they ascend.
    Ascending(const int32_t*& index, const float*& value, size_t k) {
        const int32_t* const middle = std::is_sorted_until(index, index + k);
        if (middle == index + k) return;
        const size_t before = static_cast<size_t>(middle - index);
        indices.assign(middle, index + k);
        indices.insert(indices.end(), index, middle);
        values.assign(value + before, value + k);
        values.insert(values.end(), value, value + before);
        if (!std::is_sorted(indices.begin(), indices.end())) sort();
        index = indices.data();
        value = values.data();
    }

    void sort() {
        std::vector<std::pair<int32_t, float>> pairs(indices.size());
        for (size_t j = 0; j < pairs.size(); ++j) pairs[j] = {indices[j], values[j]};
        std::stable_sort(pairs.begin(), pairs.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
        for (size_t j = 0; j < pairs.size(); ++j) std::tie(indices[j], values[j]) = pairs[j];
    }
};

// Settles the own payload, tile by tile: zeros with the entries among them.
inline void settle(const Sink& sink, size_t n, const int32_t* indices, const float* values, size_t k, float by,
                   int threads) {
    const Ascending ascending(indices, values, k);
    parallel(n, n, threads, TILE, [&](size_t first, size_t last) {
        alignas(64) float v[TILE + LANES] = {};
        size_t j = static_cast<size_t>(std::lower_bound(indices, indices + k, static_cast<int32_t>(first)) - indices);
        for (size_t t = first; t < last; t += TILE) {
            const size_t m = std::min(TILE, last - t), from = j;
            for (; j < k && static_cast<size_t>(indices[j]) < t + m; ++j)
                v[static_cast<size_t>(indices[j]) - t] += by == 1.0f ? values[j] : values[j] * by;
            sink.store(t, m, v);
            for (size_t i = from; i < j; ++i) v[static_cast<size_t>(indices[i]) - t] = 0.0f;
        }
    });
}

inline void scatter(const Sink& sink, size_t n, const int32_t* indices, const float* values, size_t k, float by,
                    int threads) {
    (sink.grad ? settle : accumulate)(sink, n, indices, values, k, by, threads);
}

}  // namespace kernels
