// Exactly k entries of largest magnitude, ties to the lowest index, in one pass over the tensor.
#pragma once

#include "random.h"

namespace kernels {

constexpr size_t PIECE = 4096;  // elements between two looks at the room that is left

struct Entry {
    int32_t key;    // bits of the magnitude: in the order of magnitudes
    int32_t index;
};

// The k-th largest of `keys`, k from 1 to their number; by radix, 11 + 10 + 10 bits.
inline int32_t kth_largest(const std::vector<Entry>& entries, size_t k) {
    uint32_t prefix = 0;
    int below = 31;
    for (int digits : {11, 10, 10}) {
        const int shift = below - digits;
        const uint32_t mask = (1u << digits) - 1;
        std::vector<size_t> count(size_t{1} << digits);
        for (const Entry& entry : entries) {
            const uint32_t key = static_cast<uint32_t>(entry.key);
            if (static_cast<uint64_t>(key) >> below == prefix) ++count[key >> shift & mask];
        }
        uint32_t digit = mask;
        while (count[digit] < k) k -= count[digit--];
        prefix = prefix << digits | digit;
        below = shift;
    }
    return static_cast<int32_t>(prefix);
}

// Of entries in ascending order of index the k largest, in the same order; all if there are no more.
inline void keep_largest(std::vector<Entry>& entries, size_t k) {
    if (entries.size() <= k) return;
    const int32_t smallest = kth_largest(entries, k);
    size_t above = 0;
    for (const Entry& entry : entries) above += entry.key > smallest;
    size_t ties = k - above, kept = 0;
    for (const Entry& entry : entries) {
        if (entry.key < smallest || (entry.key == smallest && ties == 0)) continue;
        ties -= entry.key == smallest;
        entries[kept++] = entry;
    }
    entries.resize(k);
}

// Bit i is set where lane i of a comparison's result is.
inline uint32_t bits_of(Ints passed) {
    constexpr Ints BIT = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    passed &= BIT;
    uint64_t pairs[LANES / 2], any = 0;
    std::memcpy(pairs, &passed, sizeof(passed));
    for (size_t j = 0; j < LANES / 2; ++j) any |= pairs[j];
    return static_cast<uint32_t>(any | any >> 32);
}

// The k largest of first .. last that reach `least`. When more come than `room`, they are thinned out to
// k, and what follows must be larger than the smallest of these: memory stays at `room` whatever the values.
inline std::vector<Entry> candidates(const Source& source, size_t first, size_t last, size_t k, int32_t least,
                                     size_t room) {
    std::vector<Entry> found;
    found.reserve(room + PIECE);
    const auto add = [&](size_t i) {
        const int32_t key = as<int32_t>(magnitude(source.at(i)));
        if (key >= least) found.push_back({key, static_cast<int32_t>(i)});
    };
    for (size_t start = first; start < last; start += PIECE) {
        constexpr size_t STRIDE = 4 * LANES;  // most strides hold nothing: one look at all of it
        const size_t end = std::min(last, start + PIECE), whole = start + (end - start) / STRIDE * STRIDE;
        source.each([&](auto values) {
            for (size_t i = start; i < whole; i += STRIDE) {
                Ints passed[4], either = {};
                for (size_t v = 0; v < 4; ++v) {
                    passed[v] = (as<Ints>(values(i + v * LANES)) & 0x7FFFFFFF) >= least;
                    either |= passed[v];
                }
                if (!bits_of(either)) continue;
                for (size_t v = 0; v < 4; ++v)
                    for (uint32_t lanes = bits_of(passed[v]); lanes; lanes &= lanes - 1)
                        add(i + v * LANES + static_cast<size_t>(__builtin_ctz(lanes)));
            }
        });
        for (size_t i = whole; i < end; ++i) add(i);
        if (found.size() > room) {
            keep_largest(found, k);
            least = INT32_MAX;
            for (const Entry& entry : found) least = std::min(least, entry.key);
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
    std::vector<Entry> sample(size);
    const size_t stretch = n / size;
    for (size_t i = 0; i < size; ++i) {
        const size_t at = i * stretch + Random::mix(static_cast<uint32_t>(i)) % stretch;
        sample[i] = {as<int32_t>(source.at(at)) & 0x7FFFFFFF, 0};
    }
    return kth_largest(sample, rank);
}

// Writes the indices, ascending. The estimate decides how long it takes, never what is found.
inline void select(const Source& source, size_t n, size_t k, int threads, int32_t* indices) {
    const size_t room = 2 * k + n / 64 + TILE;
    for (int32_t least = estimate(source, n, k);; least = 0) {
        std::vector<std::vector<Entry>> parts((n + TILE - 1) / TILE);  // by first tile
        parallel(n, n, threads, TILE, [&](size_t first, size_t last) {
            parts[first / TILE] = candidates(source, first, last, k, least, room);
        });
        std::vector<Entry> found = std::move(parts[0]);
        for (size_t part = 1; part < parts.size(); ++part)
            found.insert(found.end(), parts[part].begin(), parts[part].end());
        if (found.size() < k) continue;  // the estimate was too high, which 0 never is
        keep_largest(found, k);
        for (size_t i = 0; i < k; ++i) indices[i] = found[i].index;
        return;
    }
}

}  // namespace kernels
