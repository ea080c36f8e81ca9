// Exactly k entries of largest magnitude, ties to the lowest index, in one pass over the tensor.
#pragma once

#include <memory>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "random.h"

namespace kernels {

constexpr size_t PIECE = 4096;  // elements between two looks at the room that is left

// Entries in ascending order of index.
struct Entries {
    std::unique_ptr<int32_t[]> key;    // bits of the magnitude: in the order of magnitudes
    std::unique_ptr<int32_t[]> index;
    size_t size = 0;

    Entries() = default;
    // Memory that is not touched yet costs nothing; whole vectors may be written behind the last one.
    explicit Entries(size_t room) : key(new int32_t[room + LANES]), index(new int32_t[room + LANES]) {}

    void add(int32_t k, size_t i) {
        key[size] = k;
        index[size++] = static_cast<int32_t>(i);
    }
};

#ifdef __AVX512F__

inline bool any(Ints passed) { return _mm512_test_epi32_mask(as<__m512i>(passed), as<__m512i>(passed)) != 0; }

// Adds the lanes of `keys` that passed; the first one has index i.
inline void add(Entries& entries, Ints keys, Ints passed, size_t i) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
    const __mmask16 which = _mm512_test_epi32_mask(as<__m512i>(passed), as<__m512i>(passed));
    _mm512_storeu_si512(&entries.key[entries.size], _mm512_maskz_compress_epi32(which, as<__m512i>(keys)));
    _mm512_storeu_si512(&entries.index[entries.size], _mm512_maskz_compress_epi32(which, index));
    entries.size += static_cast<size_t>(__builtin_popcount(which));
}

#else

// Bit i is set where lane i of a comparison's result is.
inline uint32_t bits_of(Ints passed) {
    constexpr Ints BIT = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    passed &= BIT;
    uint64_t pairs[LANES / 2], any = 0;
    std::memcpy(pairs, &passed, sizeof(passed));
    for (size_t j = 0; j < LANES / 2; ++j) any |= pairs[j];
    return static_cast<uint32_t>(any | any >> 32);
}

inline bool any(Ints passed) { return bits_of(passed) != 0; }

inline void add(Entries& entries, Ints keys, Ints passed, size_t i) {
    for (uint32_t lanes = bits_of(passed); lanes; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        entries.add(keys[lane], i + static_cast<size_t>(lane));
    }
}

#endif

// The k-th largest of n keys, k from 1 to n; by radix, 11 + 10 + 10 bits.
inline int32_t kth_largest(const int32_t* keys, size_t n, size_t k) {
    uint32_t prefix = 0;
    int below = 31;
    for (int digits : {11, 10, 10}) {
        const int shift = below - digits;
        const uint32_t mask = (1u << digits) - 1;
        uint32_t count[1 << 11] = {};
        for (size_t i = 0; i < n; ++i) {
            const uint32_t key = static_cast<uint32_t>(keys[i]);
            if (static_cast<uint64_t>(key) >> below == prefix) ++count[key >> shift & mask];
        }
        uint32_t digit = mask;
        while (count[digit] < k) k -= count[digit--];
        prefix = prefix << digits | digit;
        below = shift;
    }
    return static_cast<int32_t>(prefix);
}

// Leaves the k largest entries, or all if there are no more; gives the smallest key that is left.
inline int32_t keep_largest(Entries& entries, size_t k) {
    int32_t* const key = entries.key.get();
    int32_t* const index = entries.index.get();
    const size_t n = entries.size;
    const int32_t smallest = kth_largest(key, n, std::min(k, n));
    if (n <= k) return smallest;
    size_t above = 0;
    for (size_t i = 0; i < n; ++i) above += key[i] > smallest;
    size_t ties = k - above, kept = 0;
    for (size_t i = 0; i < n; ++i) {  // without branches, which nobody could foresee
        const size_t tie = (key[i] == smallest) & (ties > 0);
        const size_t keep = (key[i] > smallest) | tie;
        key[kept] = key[i], index[kept] = index[i];
        kept += keep;
        ties -= tie;
    }
    entries.size = k;
    return smallest;
}

// The k largest of first .. last that reach `least`. When more come than `room`, they are thinned out to
// k, and what follows must be larger than the smallest of these: memory stays at `room` whatever the values.
inline Entries candidates(const Source& source, size_t first, size_t last, size_t k, int32_t least, size_t room) {
    Entries found(room + PIECE);
    for (size_t start = first; start < last; start += PIECE) {
        constexpr size_t STRIDE = 4 * LANES;  // most strides hold nothing: one look at all of it
        const size_t end = std::min(last, start + PIECE), whole = start + (end - start) / STRIDE * STRIDE;
        source.each([&](auto values) {
            for (size_t i = start; i < whole; i += STRIDE) {
                Ints keys[4], passed[4], either = {};
                for (size_t v = 0; v < 4; ++v) {
                    keys[v] = as<Ints>(values(i + v * LANES)) & 0x7FFFFFFF;
                    passed[v] = keys[v] >= least;
                    either |= passed[v];
                }
                if (!any(either)) continue;
                for (size_t v = 0; v < 4; ++v) add(found, keys[v], passed[v], i + v * LANES);
            }
        });
        for (size_t i = whole; i < end; ++i) {
            const int32_t key = as<int32_t>(magnitude(source.at(i)));
            if (key >= least) found.add(key, i);
        }
        if (found.size > room) {
            least = keep_largest(found, k);
            least += least < INT32_MAX;  // of equal ones the earlier are kept
        }
    }
    return found;
}

// A key that somewhat more than k of the tensor's reach: from a random sample, one of each stretch.
inline int32_t estimate(const Source& source, size_t n, size_t k) {
    const size_t size = std::max(std::min<size_t>(4096, n / 8), n / 1024);
    if (size < 64) return 0;
    const double expected = static_cast<double>(k) * static_cast<double>(size) / static_cast<double>(n);
    double spread = 1.0;
    while (spread * spread < expected) spread *= 1.1;  // about the square root
    const size_t rank = static_cast<size_t>(expected + 3.0 * spread + 4.0);
    if (rank >= size) return 0;
    std::vector<int32_t> sample(size);
    const size_t stretch = n / size;
    for (size_t i = 0; i < size; ++i) {
        const size_t at = i * stretch + Random::mix(static_cast<uint32_t>(i)) % stretch;
        sample[i] = as<int32_t>(source.at(at)) & 0x7FFFFFFF;
    }
    return kth_largest(sample.data(), size, rank);
}

inline Entries joined(std::vector<Entries>& parts) {
    size_t total = 0;
    for (const Entries& part : parts) total += part.size;
    if (total == parts[0].size) return std::move(parts[0]);
    Entries all(total);
    for (const Entries& part : parts) {
        std::copy_n(part.key.get(), part.size, all.key.get() + all.size);
        std::copy_n(part.index.get(), part.size, all.index.get() + all.size);
        all.size += part.size;
    }
    return all;
}

// Writes the indices, ascending. The estimate decides how long it takes, never what is found.
inline void select(const Source& source, size_t n, size_t k, int threads, int32_t* indices) {
    const size_t room = 2 * k + n / 64 + TILE;
    for (int32_t least = estimate(source, n, k);; least = 0) {
        std::vector<Entries> parts((n + TILE - 1) / TILE);  // by first tile
        parallel(n, n, threads, TILE, [&](size_t first, size_t last) {
            parts[first / TILE] = candidates(source, first, last, k, least, room);
        });
        Entries found = joined(parts);
        if (found.size < k) continue;  // the estimate was too high, which 0 never is
        keep_largest(found, k);
        std::copy_n(found.index.get(), k, indices);
        return;
    }
}

}  // namespace kernels
