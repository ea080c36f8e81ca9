// Products of a matrix g + e with thin factors, without a dense copy of the sum (codecs/powersgd.py).
#pragma once

#include "tiles.h"

namespace kernels {

// out[i, k] = sum over j of x[i, j] q[k, j]; x is [rows, columns], q is [rank, columns].
inline void rows_times(const Source& source, size_t rows, size_t columns, const float* q, size_t rank, float* out,
                       int threads) {
    parallel(rows, rows * columns, threads, 1, [&](size_t first, size_t last) {
        alignas(64) float x[TILE + LANES], y[TILE + LANES];
        for (size_t i = first; i < last; ++i) {
            std::fill(out + i * rank, out + (i + 1) * rank, 0.0f);
            for (size_t t = 0; t < columns; t += TILE) {
                const size_t n = std::min(TILE, columns - t), whole = whole_vectors(n);
                source.load(i * columns + t, n, x);
                std::fill(x + n, x + whole, 0.0f);
                for (size_t k = 0; k < rank; ++k) {
                    const float* factor = q + k * columns + t;
                    if (whole > n) {
                        std::memcpy(y, factor, n * sizeof(float));
                        std::fill(y + n, y + whole, 0.0f);
                        factor = y;
                    }
                    Floats sums[4] = {};
                    size_t j = 0;
                    for (; j + 4 * LANES <= whole; j += 4 * LANES)
                        for (size_t s = 0; s < 4; ++s)
                            sums[s] += vector(x + j + s * LANES) * vector(factor + j + s * LANES);
                    for (; j < whole; j += LANES) sums[0] += vector(x + j) * vector(factor + j);
                    const Floats sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
                    float total = 0.0f;
                    for (size_t lane = 0; lane < LANES; ++lane) total += sum[lane];
                    out[i * rank + k] += total;
                }
            }
        }
    });
}

// out[k, j] = sum over i of p[i, k] x[i, j]; out is [rank, columns]. One thread: all rows add to all of out.
inline void columns_times(const Source& source, size_t rows, size_t columns, const float* p, size_t rank,
                          float* out) {
    alignas(64) float x[TILE + LANES];
    std::fill(out, out + rank * columns, 0.0f);
    for (size_t t = 0; t < columns; t += TILE) {
        const size_t n = std::min(TILE, columns - t);
        for (size_t i = 0; i < rows; ++i) {
            source.load(i * columns + t, n, x);
            for (size_t k = 0; k < rank; ++k) {
                float* __restrict to = out + k * columns + t;
                const float by = p[i * rank + k];
                for (size_t j = 0; j < n; ++j) to[j] += by * x[j];
            }
        }
    }
}

// Sinks p q^T: values of [rows, columns] from p [rows, rank] and q [rank, columns], terms added in order.
inline void product(const Sink& sink, size_t rows, size_t columns, const float* p, const float* q, size_t rank,
                    int threads) {
    parallel(rows, rows * columns, threads, 1, [&](size_t first, size_t last) {
        alignas(64) float v[TILE + LANES];
        for (size_t i = first; i < last; ++i) {
            for (size_t t = 0; t < columns; t += TILE) {
                const size_t n = std::min(TILE, columns - t);
                for (size_t k = 0; k < rank; ++k) {
                    const float* __restrict factor = q + k * columns + t;
                    const float by = p[i * rank + k];
                    if (k == 0)
                        for (size_t j = 0; j < n; ++j) v[j] = by * factor[j];
                    else
                        for (size_t j = 0; j < n; ++j) v[j] += by * factor[j];
                }
                sink.store(i * columns + t, n, v);
            }
        }
    });
}

}  // namespace kernels
