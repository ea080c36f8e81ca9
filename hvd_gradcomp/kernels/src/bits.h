// Codes of 1 to 31 bits packed without gaps, least significant bit first: groups of 8 codes take `bits` bytes.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace kernels {

inline size_t packed_nbytes(size_t n, int bits) { return (n + 7) / 8 * bits; }

// 8 codes, one per byte, to 8 * bits adjacent bits, by joining neighbours three times; and back.
inline uint64_t squeeze(uint64_t v, int bits) {
    v = (v & 0x00FF00FF00FF00FFull) | ((v & 0xFF00FF00FF00FF00ull) >> (8 - bits));
    v = (v & 0x0000FFFF0000FFFFull) | ((v & 0xFFFF0000FFFF0000ull) >> (16 - 2 * bits));
    return (v & 0x00000000FFFFFFFFull) | ((v & 0xFFFFFFFF00000000ull) >> (32 - 4 * bits));
}

inline uint64_t stretch(uint64_t v, int bits) {
    const uint64_t four = (1ull << 4 * bits) - 1, two = ((1ull << 2 * bits) - 1) * 0x0000000100000001ull;
    const uint64_t one = ((1ull << bits) - 1) * 0x0001000100010001ull;
    v = (v & four) | ((v & (four << 4 * bits)) << (32 - 4 * bits));
    v = (v & two) | ((v & (two << 2 * bits)) << (16 - 2 * bits));
    return (v & one) | ((v & (one << bits)) << (8 - bits));
}

// Word: an unsigned integer of exactly `bits` bytes, so that the loop has no odd stores.
template <class Word>
inline void pack_words(const uint8_t* __restrict codes, size_t groups, uint8_t* __restrict out) {
    for (size_t i = 0; i < groups; ++i) {
        uint64_t v;
        std::memcpy(&v, codes + 8 * i, 8);
        const Word word = static_cast<Word>(squeeze(v, sizeof(Word)));
        std::memcpy(out + sizeof(Word) * i, &word, sizeof(Word));
    }
}

template <class Word>
inline void unpack_words(const uint8_t* __restrict in, size_t groups, uint8_t* __restrict codes) {
    for (size_t i = 0; i < groups; ++i) {
        Word word;
        std::memcpy(&word, in + sizeof(Word) * i, sizeof(Word));
        const uint64_t v = stretch(word, sizeof(Word));
        std::memcpy(codes + 8 * i, &v, 8);
    }
}

// Runs body with a width that the compiler knows: a copy of 5 bytes is two moves then, not a call.
template <class Body>
inline void odd(int bits, const Body& body) {
    switch (bits) {
        case 3: return body(std::integral_constant<int, 3>{});
        case 5: return body(std::integral_constant<int, 5>{});
        case 6: return body(std::integral_constant<int, 6>{});
        default: return body(std::integral_constant<int, 7>{});
    }
}

// n codes of a tile, each below 2**bits, to packed_nbytes(n, bits) bytes. `codes` has room for 8 more.
inline void pack(uint8_t* codes, size_t n, int bits, uint8_t* out) {
    const size_t groups = (n + 7) / 8;
    std::memset(codes + n, 0, 8 * groups - n);
    switch (bits) {
        case 8: std::memcpy(out, codes, n); return;  // one byte per code, no rest of a group
        case 4: pack_words<uint32_t>(codes, groups, out); return;
        case 2: pack_words<uint16_t>(codes, groups, out); return;
        case 1: pack_words<uint8_t>(codes, groups, out); return;
    }
    odd(bits, [&](auto width) {
        for (size_t i = 0; i < groups; ++i) {
            uint64_t v;
            std::memcpy(&v, codes + 8 * i, 8);
            v = squeeze(v, width());
            std::memcpy(out + width() * i, &v, width());
        }
    });
}

inline void unpack(const uint8_t* in, size_t n, int bits, uint8_t* codes) {
    const size_t groups = (n + 7) / 8;
    switch (bits) {
        case 8: std::memcpy(codes, in, n); return;
        case 4: unpack_words<uint32_t>(in, groups, codes); return;
        case 2: unpack_words<uint16_t>(in, groups, codes); return;
        case 1: unpack_words<uint8_t>(in, groups, codes); return;
    }
    odd(bits, [&](auto width) {
        for (size_t i = 0; i < groups; ++i) {
            uint64_t v = 0;
            std::memcpy(&v, in + width() * i, width());
            v = stretch(v, width());
            std::memcpy(codes + 8 * i, &v, 8);
        }
    });
}

// The same for wide codes (9 to 31 bits), through a buffer of 64 bits.
template <class Code>
inline void pack_wide(const Code* codes, size_t n, int bits, uint8_t* out) {
    uint64_t buffer = 0;
    int filled = 0;
    uint8_t* const end = out + packed_nbytes(n, bits);
    for (size_t i = 0; i < n; ++i) {
        buffer |= static_cast<uint64_t>(codes[i]) << filled;
        for (filled += bits; filled >= 8; filled -= 8, buffer >>= 8) *out++ = static_cast<uint8_t>(buffer);
    }
    for (; out < end; buffer >>= 8) *out++ = static_cast<uint8_t>(buffer);
}

template <class Code>
inline void unpack_wide(const uint8_t* in, size_t n, int bits, Code* codes) {
    uint64_t buffer = 0;
    int filled = 0;
    const uint64_t mask = (1ull << bits) - 1;
    for (size_t i = 0; i < n; ++i) {
        for (; filled < bits; filled += 8) buffer |= static_cast<uint64_t>(*in++) << filled;
        codes[i] = static_cast<Code>(buffer & mask);
        buffer >>= bits;
        filled -= bits;
    }
}

// Codes of a tile: bytes up to 8 bits, else words.
struct Codes {
    alignas(64) uint8_t bytes[TILE + 64];
    alignas(64) uint16_t words[TILE + 64];
};

// Packs codes that `make(i)` gives; a tile starts at a multiple of 8.
template <class Make>
inline void pack_tile(Codes& codes, size_t n, size_t start, int bits, uint8_t* out, const Make& make) {
    if (bits == 8) {
        uint8_t* __restrict to = out + start;
        for (size_t i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(make(i));
    } else if (bits < 8) {
        for (size_t i = 0; i < n; ++i) codes.bytes[i] = static_cast<uint8_t>(make(i));
        pack(codes.bytes, n, bits, out + start / 8 * bits);
    } else {
        for (size_t i = 0; i < n; ++i) codes.words[i] = static_cast<uint16_t>(make(i));
        pack_wide(codes.words, n, bits, out + start / 8 * bits);
    }
}

// And gives each code back to `use(i, code)`.
template <class Use>
inline void unpack_tile(Codes& codes, size_t n, size_t start, int bits, const uint8_t* in, const Use& use) {
    if (bits == 8) {
        const uint8_t* __restrict from = in + start;
        for (size_t i = 0; i < n; ++i) use(i, static_cast<int32_t>(from[i]));
    } else if (bits < 8) {
        unpack(in + start / 8 * bits, n, bits, codes.bytes);
        for (size_t i = 0; i < n; ++i) use(i, static_cast<int32_t>(codes.bytes[i]));
    } else {
        unpack_wide(in + start / 8 * bits, n, bits, codes.words);
        for (size_t i = 0; i < n; ++i) use(i, static_cast<int32_t>(codes.words[i]));
    }
}

}  // namespace kernels
