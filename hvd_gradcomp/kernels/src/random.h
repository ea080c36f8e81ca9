// The project's random numbers (ops/rng.py): the same bits.
#pragma once

#include "tiles.h"

namespace kernels {

struct Random {
    uint32_t first = 0, second = 0;  // of seed, name, step and rank

    static uint32_t mix(uint32_t x) {
        x = (x ^ (x >> 16)) * 0x7FEB352Du;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        return x ^ (x >> 16);
    }
    uint32_t bits(uint32_t i) const { return mix((mix(i ^ first) + second) ^ first); }

    // in [0, 1), a multiple of 2**-24
    float uniform(uint32_t i) const { return static_cast<float>(static_cast<int32_t>(bits(i) >> 8)) * 0x1p-24f; }
};

}  // namespace kernels
