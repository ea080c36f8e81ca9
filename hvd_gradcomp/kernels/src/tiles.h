// One driver over tiles: load what is to be compressed, run a codec's tile functions, store.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace kernels {

constexpr size_t TILE = 4096;  // elements on the stack at a time; larger blocks are loaded twice
constexpr size_t LANES = 16;   // of the vectors below; every tile buffer has room for whole vectors
constexpr size_t PER_THREAD = 1 << 18;  // a thread with fewer elements costs more than it saves

// Fixed vectors instead of the machine's: reductions have one order on every processor, and compilers
// vectorise these where they do not vectorise a reduction written as a loop.
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

template <class To, class From>
inline To as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof(y));
    return y;
}

inline Floats vector(const float* x) {
    Floats v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}

// LANES values, or one, from an index on: what is written once for both.
template <class V>
inline V get(const float* x, size_t i) {
    V v;
    std::memcpy(&v, x + i, sizeof(v));
    return v;
}

inline size_t whole_vectors(size_t n) { return (n + LANES - 1) / LANES * LANES; }

// Round half to even for |x| < 2**22; the compiler must not see through it (no -ffast-math here).
inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

inline float magnitude(float x) { return as<float>(as<uint32_t>(x) & 0x7FFFFFFFu); }

// Memory would wait while codes are computed: ask for n values of the block after the next. (No address is an error.)
inline void prefetch(const float* next, size_t n) {
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(next + i);
}

// What SGD's momentum makes of a gradient before it is compressed (memory/dgc.py, whose order of operations this is).
struct Momentum {
    float* velocity = nullptr;  // null: no momentum; only a Sink writes to it
    const float* weights = nullptr;  // null: no decay
    float momentum = 0.0f, decay = 0.0f, clip = 1.0f;
    bool nesterov = false;

    template <class V>
    struct Next {
        V velocity, total;  // the new u and v, before anything is taken from them
    };

    template <class V>
    Next<V> next(const float* grad, const float* residual, float scale, size_t i) const {
        V g = get<V>(grad, i);
        if (scale != 1.0f) g = g / scale;
        g = g * clip;
        if (weights) g = get<V>(weights, i) * decay + g;
        V u = get<V>(velocity, i);
        u = nesterov ? (u + g) * momentum : u * momentum + g;
        V v = u + get<V>(residual, i);
        if (nesterov) v = v + g;
        return {u, v};
    }
};

// A gradient with what was kept of earlier ones: x = g, g + e, or g + e * scale; or with momentum.
struct Source {
    const float* grad;
    const float* residual;  // may be null
    float scale;            // 1 if there is none
    Momentum sgd = {};

    float at(size_t i) const {
        if (sgd.velocity) return sgd.next<float>(grad, residual, scale, i).total * scale;
        if (!residual) return grad[i];
        return scale == 1.0f ? grad[i] + residual[i] : grad[i] + residual[i] * scale;
    }

    // Runs body with a function that gives LANES values from an index on: what is looked at but once needs no tile.
    template <class Body>
    void each(const Body& body) const {
        const float *g = grad, *e = residual;
        const float s = scale;
        if (const Momentum m = sgd; m.velocity)
            body([m, g, e, s](size_t i) { return m.next<Floats>(g, e, s, i).total * s; });
        else if (!e) body([g](size_t i) { return vector(g + i); });
        else if (s == 1.0f) body([g, e](size_t i) { return vector(g + i) + vector(e + i); });
        else body([g, e, s](size_t i) { return vector(g + i) + vector(e + i) * s; });
    }

    void ask(size_t start, size_t n) const {
        prefetch(grad + start, n);
        if (residual) prefetch(residual + start, n);
        if (sgd.velocity) prefetch(sgd.velocity + start, n);
    }

    void load(size_t start, size_t n, float* __restrict x) const {
        const float *__restrict g = grad + start, *__restrict e = residual + start;
        if (sgd.velocity) {
            correct(start, n, x);
        } else if (!residual) {
            std::memcpy(x, g, n * sizeof(float));
        } else if (scale == 1.0f) {
            for (size_t i = 0; i < n; ++i) x[i] = g[i] + e[i];
        } else {
            for (size_t i = 0; i < n; ++i) x[i] = g[i] + e[i] * scale;
        }
    }

    // load() with momentum: one function, not a part of each codec's loop.
    __attribute__((noinline)) void correct(size_t start, size_t n, float* __restrict x) const {
        const size_t whole = n / LANES * LANES;
        const Source own = *this;
        for (size_t i = 0; i < whole; i += LANES) {
            const Floats v = own.sgd.next<Floats>(own.grad, own.residual, own.scale, start + i).total * own.scale;
            std::memcpy(x + i, &v, sizeof(v));
        }
        for (size_t i = whole; i < n; ++i) x[i] = own.at(start + i);
    }
};

// Where decoded values go: added to an accumulator (and divided by the number of ranks after the last
// one), or, of the own payload, taken from g + e and the rest kept as the new residual. With momentum the
// velocity starts anew where something was sent.
struct Sink {
    float* target;
    const float* grad;  // null: accumulate; else `target` is the residual
    float scale;        // the divisor, or the loss scale
    Momentum sgd = {};

    void ask(size_t start, size_t n) const {
        prefetch(target + start, n);
        if (grad) prefetch(grad + start, n);
        if (sgd.velocity) prefetch(sgd.velocity + start, n);
    }

    void store(size_t start, size_t n, const float* __restrict v) const {
        float* __restrict t = target + start;
        const float* __restrict g = grad + start;
        // 0 + v, as if v had been added to zeros first: the sign of a zero is the same then
        if (sgd.velocity) {
            correct(start, n, v);
        } else if (!grad && scale == 1.0f) {
            for (size_t i = 0; i < n; ++i) t[i] += v[i];
        } else if (!grad) {
            for (size_t i = 0; i < n; ++i) t[i] = (t[i] + v[i]) / scale;
        } else if (scale == 1.0f) {
            for (size_t i = 0; i < n; ++i) t[i] = (g[i] + t[i]) - (0.0f + v[i]);
        } else {
            for (size_t i = 0; i < n; ++i) t[i] = ((g[i] + t[i] * scale) - (0.0f + v[i])) / scale;
        }
    }

    __attribute__((noinline)) void correct(size_t start, size_t n, const float* v) const {
        const size_t whole = n / LANES * LANES;
        const Sink own = *this;
        for (size_t i = 0; i < whole; i += LANES) own.settle<Floats>(start + i, v + i);
        for (size_t i = whole; i < n; ++i) own.settle<float>(start + i, v + i);
    }

    template <class V>
    void settle(size_t i, const float* v) const {
        Momentum::Next<V> next = sgd.next<V>(grad, target, scale, i);
        const V sent = V{} + get<V>(v, 0);
        next.total = next.total - (scale == 1.0f ? sent : sent / scale);
        next.velocity = sent > 0.0f ? V{} : next.velocity;
        next.velocity = sent < 0.0f ? V{} : next.velocity;
        std::memcpy(target + i, &next.total, sizeof(V));
        std::memcpy(sgd.velocity + i, &next.velocity, sizeof(V));
    }
};

// Runs body(first, last) over 0 .. count in up to `threads` stretches, each a multiple of `step` long.
template <class Body>
void parallel(size_t count, size_t elements, int threads, size_t step, const Body& body) {
    size_t parts = std::min<size_t>(std::max(threads, 1), std::max<size_t>(elements / PER_THREAD, 1));
    const size_t stretch = ((count + parts - 1) / parts + step - 1) / step * step;
    parts = stretch ? (count + stretch - 1) / stretch : 0;
    std::vector<std::thread> others;
    for (size_t part = 1; part < parts; ++part)
        others.emplace_back([&body, part, stretch, count] {
            body(part * stretch, std::min(count, (part + 1) * stretch));
        });
    if (count) body(size_t{0}, std::min(count, stretch));
    for (std::thread& other : others) other.join();
}

// The blocks of a vector of n elements.
struct Blocks {
    size_t n, block;
    size_t count() const { return (n + block - 1) / block; }
    size_t length(size_t b) const { return std::min(block, n - b * block); }
};

// A codec has a State per block and
//   measure(x, n, state)          looks at the values of a block, tile by tile;
//   finish(b, length, state)      stores what describes block b;
//   code(x, n, start, state)      stores the codes of n values from `start` on, PIECE of them at a time; x may be
//                                 overwritten.
// x has room for whole vectors behind its n values.
template <class Codec>
void encode(const Codec& codec, const Source& source, Blocks blocks, int threads) {
    parallel(blocks.count(), blocks.n, threads, Codec::RUN, [&](size_t first, size_t last) {
        alignas(64) float x[TILE + LANES];
        typename Codec::Scratch scratch;
        for (size_t b = first; b < last; ++b) {
            const size_t start = b * blocks.block, length = blocks.length(b);
            typename Codec::State state;
            for (size_t t = 0; t < length; t += TILE) {
                const size_t n = std::min(TILE, length - t);
                source.load(start + t, n, x);
                codec.measure(x, n, state);
            }
            codec.finish(b, length, state);
            for (size_t t = 0; t < length; t += Codec::PIECE) {
                const size_t n = std::min(Codec::PIECE, length - t);
                if (length > TILE) source.load(start + t, n, x);
                else source.ask(start + 2 * length + t, n);
                codec.code(length > TILE ? x : x + t, n, start + t, state, scratch);
            }
        }
    });
}

// And decode(b, start, n, v): the values of n elements of block b from `start` on.
template <class Codec>
void decode(const Codec& codec, const Sink& sink, Blocks blocks, int threads) {
    parallel(blocks.count(), blocks.n, threads, Codec::RUN, [&](size_t first, size_t last) {
        alignas(64) float v[TILE + LANES];
        typename Codec::Scratch scratch;
        for (size_t b = first; b < last; ++b) {
            const size_t start = b * blocks.block, length = blocks.length(b);
            for (size_t t = 0; t < length; t += Codec::PIECE) {
                const size_t n = std::min(Codec::PIECE, length - t);
                sink.ask(start + t, n);
                codec.decode(b, start + t, n, v, scratch);
                sink.store(start + t, n, v);
            }
        }
    });
}

// The mean of what each rank's payload holds, written over `target`: as if they had been added to zeros, one by one. Of a
// single payload that was summed in flight, `ranks` is still the number of ranks.
template <class Codec>
void mean(const std::vector<const Codec*>& payloads, float* target, float ranks, Blocks blocks, int threads) {
    parallel(blocks.count(), blocks.n, threads, Codec::RUN, [&](size_t first, size_t last) {
        alignas(64) float v[TILE + LANES], sum[TILE + LANES];
        std::vector<typename Codec::Scratch> scratch(payloads.size());
        for (size_t b = first; b < last; ++b) {
            const size_t start = b * blocks.block, length = blocks.length(b);
            for (size_t t = 0; t < length; t += Codec::PIECE) {
                const size_t n = std::min(Codec::PIECE, length - t);
                std::fill(sum, sum + n, 0.0f);
                for (size_t i = 0; i < payloads.size(); ++i) {
                    payloads[i]->decode(b, start + t, n, v, scratch[i]);
                    for (size_t j = 0; j < n; ++j) sum[j] += v[j];
                }
                float* __restrict out = target + start + t;
                for (size_t j = 0; j < n; ++j) out[j] = sum[j] / ranks;
            }
        }
    });
}

// Sum of n values, n at most TILE, as of a row of `width` values padded to a power of two: the upper half is
// added to the lower half until one is left. x is overwritten and has room for `width` rounded up.
inline float tree_sum(float* __restrict x, size_t n, size_t width) {
    size_t w = 1;
    while (w < width) w *= 2;
    std::fill(x + n, x + w, 0.0f);
    for (w /= 2; w > 0; w /= 2)
        for (size_t i = 0; i < w; ++i) x[i] += x[i + w];
    return x[0];
}

// Powers of two (down, up) with largest * down in 1 to 2; 0 for blocks that count as zeros (blocks.py).
inline void powers(float largest, float& down, float& up) {
    const uint32_t field = std::min(std::max((as<uint32_t>(largest) >> 23) & 255u, 1u), 253u);
    const bool zeros = largest < 0x1p-80f;
    down = zeros ? 0.0f : as<float>((254u - field) << 23);
    up = zeros ? 0.0f : as<float>(field << 23);
}

// Largest magnitude of n values; NaN if one is. The bits of magnitudes are in the order of magnitudes.
inline float largest_magnitude(float* x, size_t n) {
    std::fill(x + n, x + whole_vectors(n), 0.0f);
    Ints most = {};
    for (size_t i = 0; i < n; i += LANES) {
        const Ints bits = as<Ints>(vector(x + i)) & 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    int32_t result = 0;
    for (size_t i = 0; i < LANES; ++i) result = std::max(result, most[i]);
    return as<float>(result);
}

inline float largest(const Source& source, size_t n) {
    Ints most = {};
    const size_t whole = n / LANES * LANES;
    source.each([&](auto values) {
        Ints m = {};
        for (size_t i = 0; i < whole; i += LANES) {
            const Ints bits = as<Ints>(values(i)) & 0x7FFFFFFF;
            m = bits > m ? bits : m;
        }
        most = m;
    });
    int32_t result = 0;
    for (size_t i = 0; i < LANES; ++i) result = std::max(result, most[i]);
    for (size_t i = whole; i < n; ++i) result = std::max(result, as<int32_t>(magnitude(source.at(i))));
    return as<float>(result);
}

}  // namespace kernels
