// The tile functions of the scalar codecs; each gives the bytes of the class of its name in codes/*.py.
#pragma once

#include "bits.h"
#include "random.h"

namespace kernels {

// Rounds levels to whole numbers from 0 to `most`, up with a probability equal to the fraction. A value that
// stands on a level misses it by a rounding error: such a miss is no fraction.
inline void round_stochastic(float* __restrict level, size_t n, size_t start, const Random& random, float most) {
    alignas(64) float drawn[TILE];
    const Random own = random;
    const float exact = most * 0x1p-22f;
    // in a loop of its own, or the compiler draws only where it must, one by one
    for (size_t i = 0; i < n; ++i)
        drawn[i] = static_cast<float>(static_cast<int32_t>(level[i] + own.uniform(static_cast<uint32_t>(start + i))));
    for (size_t i = 0; i < n; ++i) {
        const float near = nearest(level[i]);
        float code = magnitude(level[i] - near) <= exact ? near : drawn[i];
        code = code < 0.0f ? 0.0f : code;
        level[i] = code > most ? most : code;
    }
}

// uniform: codes are steps from the lowest level of a block.
struct Uniform {
    static constexpr size_t RUN = 1;
    static constexpr size_t PIECE = 256;
    using Scratch = Codes;
    struct State {
        Floats low = {}, high = {};
        Ints nan = {};
        bool empty = true, huge = false, void_block = false;
        float base = 0.0f, step = 0.0f, divisor = 1.0f;
    };

    float* step;
    float* low;  // null if symmetric
    uint8_t* codes;
    int bits;
    bool symmetric, stochastic;
    Random random;

    float top() const {
        return static_cast<float>(symmetric ? 2 * ((1 << (bits - 1)) - 1) : (1 << bits) - 1);
    }

    // What is above this stays in the residual. Denormals need no care: beside a step of at least 2**-100 they
    // are lost in rounding, and smaller steps are 0.
    static float cut(float x) {
        x = x < -0x1p125f ? -0x1p125f : x;
        return x > 0x1p125f ? 0x1p125f : x;
    }

    void measure(float* x, size_t n, State& s) const {
        std::fill(x + n, x + whole_vectors(n), x[n - 1]);
        if (s.empty) s.low = s.high = vector(x);
        s.empty = false;
        Floats low = s.low, high = s.high;
        Ints nan = s.nan;
        for (size_t i = 0; i < n; i += LANES) {
            const Floats v = vector(x + i);
            low = v < low ? v : low;
            high = v > high ? v : high;
            nan |= v != v;
        }
        s.low = low, s.high = high, s.nan = nan;
    }

    void finish(size_t b, size_t, State& s) const {
        float lowest = s.low[0], highest = s.high[0];
        int32_t nan = s.nan[0];
        for (size_t i = 1; i < LANES; ++i) {
            lowest = s.low[i] < lowest ? s.low[i] : lowest;
            highest = s.high[i] > highest ? s.high[i] : highest;
            nan |= s.nan[i];
        }
        s.huge = cut(lowest) != lowest || cut(highest) != highest;
        s.void_block = nan != 0;
        lowest = s.void_block ? __builtin_nanf("") : cut(lowest);
        highest = s.void_block ? lowest : cut(highest);
        const float half = top() / 2;
        if (symmetric) highest = -lowest > highest ? -lowest : highest;
        s.step = symmetric ? highest / half : (highest - lowest) / top();
        if (magnitude(s.step) < 0x1p-100f) s.step = 0.0f;
        s.base = symmetric ? -(s.step * half) : magnitude(lowest) < 0x1p-100f ? 0.0f : lowest;
        s.divisor = s.step > 0.0f ? s.step : s.step + 1.0f;
        step[b] = s.step;
        if (!symmetric) low[b] = s.base;
    }

    // Levels by a multiplication with the inverse: less than 2**-14 from the quotients, up to 8 bits. Whether
    // that much decides no rounding.
    static bool approximate(const float* x, size_t n, float base, float divisor, float* level) {
        const Floats inverse = Floats{} + 1.0f / divisor, low = Floats{} + base;
        Ints far = {};
        for (size_t i = 0; i < n; i += LANES) {
            const Floats each = (vector(x + i) - low) * inverse;
            const Floats whole = (each + 12582912.0f) - 12582912.0f;
            const Ints miss = as<Ints>(each - whole) & 0x7FFFFFFF;
            far = miss > far ? miss : far;
            std::memcpy(level + i, &each, sizeof(each));
        }
        int32_t most = 0;
        for (size_t i = 0; i < LANES; ++i) most = std::max(most, far[i]);
        return as<float>(most) < 0.5f - 0x1p-14f;
    }

    void code(float* x, size_t n, size_t start, const State& s, Scratch& scratch) const {
        const float most = top(), base = s.base, divisor = s.divisor;
        alignas(64) float level[PIECE + LANES];
        if (s.void_block) {
            pack_tile(scratch, n, start, bits, codes, [](size_t) { return 0; });
            return;
        }
        if (s.huge)
            for (size_t i = 0; i < n; ++i) x[i] = cut(x[i]);
        if (stochastic || bits > 8 || !approximate(x, n, base, divisor, level))
            for (size_t i = 0; i < n; ++i) level[i] = (x[i] - base) / divisor;
        if (stochastic) round_stochastic(level, n, start, random, most);
        pack_tile(scratch, n, start, bits, codes, [=, &level](size_t i) {
            const float at_least_0 = level[i] < 0.0f ? 0.0f : level[i];
            return static_cast<int32_t>(nearest(at_least_0 > most ? most : at_least_0));
        });
    }

    void decode(size_t b, size_t start, size_t n, float* __restrict v, Scratch& scratch) const {
        const float scale = step[b];
        if (symmetric) {
            const int32_t zero = (1 << (bits - 1)) - 1;
            unpack_tile(scratch, n, start, bits, codes,
                        [=](size_t i, int32_t code) { v[i] = static_cast<float>(code - zero) * scale; });
        } else {
            const float base = low[b];
            unpack_tile(scratch, n, start, bits, codes,
                        [=](size_t i, int32_t code) { v[i] = static_cast<float>(code) * scale + base; });
        }
    }
};

// What codecs share that look at the largest magnitude of a block.
struct Largest {
    float value = 0.0f;
    void measure(float* x, size_t n) {
        const float most = largest_magnitude(x, n);
        value = as<int32_t>(most) > as<int32_t>(value) ? most : value;  // by bits, so that NaN wins
    }
};

// log: the place of |x| / scale in a table of middles between levels. Keys, the leading bits of a number, are so many
// that one has at most one middle; `steps` holds how many middles are below all numbers with a key, and under the bits
// of that what must be added to the trailing bits of the middle to carry into it. So does what is above the middle.
struct Log {
    static constexpr size_t RUN = 1;
    static constexpr size_t PIECE = 256;
    using Scratch = Codes;
    struct State : Largest {
        float scale, divisor;
    };

    float* scale;
    uint8_t* codes;
    int bits;
    const float* values;    // by code: the levels, then their negatives
    const uint32_t* steps;  // by key
    int shift;              // trailing bits
    int32_t lowest;         // the key of steps[0]: all numbers with it, or a smaller one, are below the middles

    void measure(float* x, size_t n, State& s) const { s.measure(x, n); }

    void finish(size_t b, size_t, State& s) const {
        s.scale = s.value < 0x1p-80f ? 0.0f : s.value;
        s.divisor = s.scale > 0.0f ? s.scale : s.scale + 1.0f;
        scale[b] = s.scale;
    }

    void code(float* __restrict x, size_t n, size_t start, const State& s, Scratch& scratch) const {
        const float divisor = s.divisor;
        const int shift = this->shift, bits = this->bits;
        const int32_t lowest = this->lowest;
        const uint32_t trailing = (1u << shift) - 1;
        const uint32_t* __restrict steps = this->steps;
        alignas(64) int32_t level[PIECE];
        for (size_t i = 0; i < n; ++i) {
            const float ratio = magnitude(x[i]) / divisor;
            const uint32_t u = as<uint32_t>(ratio <= 1.0f ? ratio : 1.0f);  // also of a NaN
            const int32_t key = static_cast<int32_t>(u >> shift) - lowest;
            level[i] = static_cast<int32_t>((steps[key < 0 ? 0 : key] + (u & trailing)) >> shift);
        }
        pack_tile(scratch, n, start, bits, codes, [=, &level](size_t i) {
            return level[i] | static_cast<int32_t>(as<uint32_t>(x[i]) >> 31 << (bits - 1));
        });
    }

    void decode(size_t b, size_t start, size_t n, float* __restrict v, Scratch& scratch) const {
        const float by = scale[b];
        const float* __restrict values = this->values;
        unpack_tile(scratch, n, start, bits, codes, [=](size_t i, int32_t code) { v[i] = values[code] * by; });
    }
};

// sign: one bit per element, the mean magnitude per block.
struct Sign {
    static constexpr size_t RUN = 1;
    static constexpr size_t PIECE = 256;
    using Scratch = Codes;
    struct State {
        float sum = 0.0f;
    };

    float* scale;
    uint8_t* signs;
    size_t width;  // elements of a whole block

    static constexpr float TINY = 0x1p-90f;  // magnitudes below it count as 0, which is positive

    float room() const {  // a power of two by which terms are scaled so that their sum does not overflow
        int bits = 0;
        while (width >> bits) ++bits;
        return as<float>(static_cast<uint32_t>(127 - bits) << 23);
    }

    void measure(float* x, size_t n, State& s) const {
        alignas(64) float terms[TILE + LANES];
        const float by = room();
        for (size_t i = 0; i < n; ++i) terms[i] = magnitude(x[i]) < TINY ? 0.0f : magnitude(x[i]) * by;
        s.sum = tree_sum(terms, n, width);
    }

    void finish(size_t b, size_t length, State& s) const {
        scale[b] = s.sum / (static_cast<float>(length) * room());
    }

    void code(float* x, size_t n, size_t start, const State&, Scratch& scratch) const {
        pack_tile(scratch, n, start, 1, signs, [=](size_t i) { return x[i] > -TINY ? 1 : 0; });
    }

    void decode(size_t b, size_t start, size_t n, float* __restrict v, Scratch& scratch) const {
        const float by = scale[b];
        unpack_tile(scratch, n, start, 1, signs,
                    [=](size_t i, int32_t bit) { v[i] = static_cast<float>(2 * bit - 1) * by; });
    }
};

// ternary: digits -1, 0, 1 as 0, 1, 2, five to a byte; five blocks make whole bytes.
struct Ternary {
    static constexpr size_t RUN = 5;
    static constexpr size_t PIECE = TILE;
    struct Scratch {
        alignas(64) uint8_t digits[RUN * TILE + 8];
    };
    struct State : Largest {
        size_t b;
        float scale, divisor, down, up;
    };

    float* scale;
    uint8_t* digits;
    size_t n, width;
    bool error_feedback;
    Random random;

    void measure(float* x, size_t count, State& s) const { s.measure(x, count); }

    void finish(size_t b, size_t, State& s) const {
        s.b = b;
        s.scale = s.value < 0x1p-80f ? 0.0f : s.value;
        s.divisor = s.scale > 0.0f ? s.scale : s.scale + 1.0f;
        powers(s.value, s.down, s.up);
        scale[b] = s.scale;
    }

    void code(float* x, size_t count, size_t start, const State& s, Scratch& scratch) const {
        alignas(64) float kept[TILE + LANES], terms[TILE + LANES];
        const float divisor = s.divisor, down = s.down;
        const Random random = this->random;
        uint8_t* const to = scratch.digits + (s.b % RUN) * width;
        for (size_t i = 0; i < count; ++i) {
            const float share = magnitude(x[i]) / divisor;
            const float k = static_cast<float>(
                static_cast<int32_t>(share + random.uniform(static_cast<uint32_t>(start + i))));
            kept[i] = k > 1.0f ? 1.0f : k;
            terms[i] = magnitude(x[i]) * down * kept[i];
        }
        for (size_t i = 0; i < count; ++i) {
            const int32_t sign = 1 - 2 * static_cast<int32_t>(as<uint32_t>(x[i]) >> 31);
            to[i] = static_cast<uint8_t>(1 + static_cast<int32_t>(kept[i]) * sign);
        }
        if (error_feedback) {
            const float sum = tree_sum(terms, count, width), number = tree_sum(kept, count, width);
            scale[s.b] = sum / (number > 1.0f ? number : 1.0f) * s.up;
        }
        const size_t end = start + count;
        if (s.b % RUN == RUN - 1 || end == n) pack(scratch.digits, s.b / RUN * RUN * width, end);
    }

    void pack(uint8_t* from, size_t start, size_t end) const {
        const size_t groups = (end - start + 4) / 5;
        std::memset(from + (end - start), 0, 5 * groups - (end - start));
        uint8_t* to = digits + start / 5;
        for (size_t i = 0; i < groups; ++i, from += 5)
            to[i] = static_cast<uint8_t>(from[0] + 3 * (from[1] + 3 * (from[2] + 3 * (from[3] + 3 * from[4]))));
    }

    void decode(size_t b, size_t start, size_t count, float* __restrict v, Scratch& scratch) const {
        if (b % RUN == 0) {
            const size_t groups = (std::min(RUN * width, n - start) + 4) / 5;
            for (size_t i = 0; i < groups; ++i) {
                int value = digits[start / 5 + i];
                for (size_t j = 0; j < 5; ++j, value /= 3)
                    scratch.digits[5 * i + j] = static_cast<uint8_t>(j < 4 ? value % 3 : std::min(value, 2));
            }
        }
        const uint8_t* from = scratch.digits + (b % RUN) * width;
        const float by = scale[b];
        for (size_t i = 0; i < count; ++i) v[i] = static_cast<float>(static_cast<int32_t>(from[i]) - 1) * by;
    }
};

// qsgd: stochastic levels of the block's norm.
struct Qsgd {
    static constexpr size_t RUN = 1;
    static constexpr size_t PIECE = TILE;
    using Scratch = Codes;
    struct State : Largest {
        size_t b;
        float down, up;
    };

    float* step;
    uint8_t* codes;
    size_t width;
    int levels, bits;
    bool error_feedback;
    Random random;

    void measure(float* x, size_t n, State& s) const { s.measure(x, n); }

    void finish(size_t b, size_t, State& s) const {
        s.b = b;
        powers(s.value, s.down, s.up);
    }

    static float root(float x) {  // ops/exact.py
        float guess = as<float>((as<int32_t>(x) >> 1) + (127 << 22));
        for (int i = 0; i < 4; ++i) guess = 0.5f * (guess + x / guess);
        return guess;
    }

    void code(float* x, size_t n, size_t start, const State& s, Scratch& scratch) const {
        alignas(64) float terms[TILE + LANES], level[TILE + LANES];
        const float down = s.down, most = static_cast<float>(levels);
        for (size_t i = 0; i < n; ++i) {
            const float r = magnitude(x[i]) * down;
            terms[i] = r * r;
        }
        const float sum = tree_sum(terms, n, width);
        float unit = root(sum <= 1.0f ? 1.0f : sum) / most;
        for (size_t i = 0; i < n; ++i) level[i] = magnitude(x[i]) * down / unit;
        round_stochastic(level, n, start, random, most);
        const int shift = bits - 1;
        pack_tile(scratch, n, start, bits, codes, [=, &level](size_t i) {
            return static_cast<int32_t>(level[i]) | static_cast<int32_t>(as<uint32_t>(x[i]) >> 31 << shift);
        });
        if (error_feedback) {
            for (size_t i = 0; i < n; ++i) terms[i] = magnitude(x[i]) * down * level[i];
            const float along = tree_sum(terms, n, width);
            for (size_t i = 0; i < n; ++i) level[i] *= level[i];
            const float square = tree_sum(level, n, width);
            unit = along / (square > 1.0f ? square : 1.0f);
        }
        const float limit = static_cast<float>(0x1p126 / levels);
        step[s.b] = unit * s.up > limit ? limit : unit * s.up;
    }

    void decode(size_t b, size_t start, size_t n, float* __restrict v, Scratch& scratch) const {
        const float by = step[b];
        const int shift = bits - 1, mask = (1 << shift) - 1;
        unpack_tile(scratch, n, start, bits, codes, [=](size_t i, int32_t code) {
            v[i] = static_cast<float>((1 - 2 * (code >> shift)) * (code & mask)) * by;
        });
    }
};

// natural: powers of two by the bits of x itself; `base` is the lowest exponent of the tensor's 127.
struct Natural {
    static constexpr size_t RUN = 1;
    static constexpr size_t PIECE = 256;
    struct Scratch {};
    struct State {};

    uint8_t* codes;
    uint8_t* base;
    Random random;

    static int32_t clean(float x) {
        int32_t bits = as<int32_t>(x) & 0x7FFFFFFF;
        bits = bits > 0x7F7FFFFF ? 0x7F7FFFFF : bits;
        return bits < (1 << 23) ? 0 : bits;
    }
    int32_t exponent(float x, size_t i) const {
        const int32_t raised = clean(x) + static_cast<int32_t>(random.bits(static_cast<uint32_t>(i)) >> 9);
        const int32_t e = static_cast<int32_t>(static_cast<uint32_t>(raised) >> 23);
        return e > 254 ? 254 : e;
    }

    // Before encode(): the base. Only what has the largest exponent so far can raise it.
    void find_base(const Source& source, size_t n) const {
        alignas(64) float x[TILE + LANES];
        int32_t most = 127;
        for (size_t t = 0; t < n; t += PIECE) {
            const size_t m = std::min(PIECE, n - t);
            source.load(t, m, x);
            if (as<int32_t>(largest_magnitude(x, m)) >> 23 < most) continue;
            for (size_t i = 0; i < m; ++i)
                if (clean(x[i]) >> 23 >= most) most = std::max(most, exponent(x[i], t + i));
        }
        *base = static_cast<uint8_t>(most - 127);
    }

    void measure(float*, size_t, State&) const {}
    void finish(size_t, size_t, State&) const {}

    void code(float* x, size_t n, size_t start, const State&, Scratch&) const {
        const int32_t lowest = *base;
        uint8_t* __restrict to = codes + start;
        for (size_t i = 0; i < n; ++i) {
            const int32_t e = exponent(x[i], start + i) - lowest;
            to[i] = static_cast<uint8_t>((e < 0 ? 0 : e) | static_cast<int32_t>(as<uint32_t>(x[i]) >> 31 << 7));
        }
    }

    void decode(size_t, size_t start, size_t n, float* __restrict v, Scratch&) const {
        const int32_t lowest = *base;
        const uint8_t* __restrict from = codes + start;
        for (size_t i = 0; i < n; ++i) {
            const uint32_t code = from[i] & 127u;
            const uint32_t e = code ? (code + static_cast<uint32_t>(lowest)) & 255u : 0u;
            v[i] = as<float>(e << 23 | static_cast<uint32_t>(from[i]) >> 7 << 31);
        }
    }
};

// bf16: the upper half of the bits, rounded half to even.
struct Bf16 {
    static constexpr size_t RUN = 1;
    static constexpr size_t PIECE = 256;
    struct Scratch {};
    struct State {};

    int16_t* values;

    void measure(float*, size_t, State&) const {}
    void finish(size_t, size_t, State&) const {}
    void code(float* x, size_t n, size_t start, const State&, Scratch&) const {
        int16_t* __restrict to = values + start;
        for (size_t i = 0; i < n; ++i) {
            const uint32_t bits = as<uint32_t>(x[i]);
            uint32_t size = bits & 0x7FFFFFFFu;
            size = size > 0x7F7F0000u ? 0x7F7F0000u : size;
            const uint32_t rounded = (size + (size >> 16 & 1u) + 0x7FFFu) >> 16;
            to[i] = static_cast<int16_t>(rounded | (bits >> 31 << 15));
        }
    }
    void decode(size_t, size_t start, size_t n, float* __restrict v, Scratch&) const {
        const int16_t* __restrict from = values + start;
        for (size_t i = 0; i < n; ++i) v[i] = as<float>(static_cast<uint32_t>(static_cast<uint16_t>(from[i])) << 16);
    }
};

// fp16: half precision times a power of two.
struct Fp16 {
    static constexpr size_t RUN = 1;
    static constexpr size_t PIECE = 256;
    struct Scratch {};
    struct State {};

    uint16_t* values;
    float by, limit;

    static uint16_t half(float x) {  // |x| at most 65504, or NaN
        const uint32_t bits = as<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
        // below 2**-14 the spacing is that of floats from 0.5 on, so the addition rounds
        const uint32_t small = as<uint32_t>(as<float>(size) + 0.5f) - 0x3F000000u;
        const uint32_t large = (size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13;
        const uint32_t nan = 0x7E00u;
        return static_cast<uint16_t>(sign | (size > 0x7F800000u ? nan : size < 0x38800000u ? small : large));
    }
    static float single(uint16_t h) {
        const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, size = h & 0x7FFFu;
        const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f;
        const uint32_t large = (size << 13) + (size >= 0x7C00u ? 0x70000000u : 0x38000000u);
        return as<float>(sign | (size < 0x400u ? as<uint32_t>(small) : large));
    }

    void measure(float*, size_t, State&) const {}
    void finish(size_t, size_t, State&) const {}
    void code(float* x, size_t n, size_t start, const State&, Scratch&) const {
        uint16_t* __restrict to = values + start;
        const float by = this->by, limit = this->limit;
        for (size_t i = 0; i < n; ++i) {
            float y = x[i] * by;
            y = y < -limit ? -limit : y;
            to[i] = half(y > limit ? limit : y);
        }
    }
    void decode(size_t, size_t start, size_t n, float* __restrict v, Scratch&) const {
        const uint16_t* __restrict from = values + start;
        const float by = this->by;
        for (size_t i = 0; i < n; ++i) v[i] = single(from[i]) / by;
    }
};

}  // namespace kernels
