"""Thresholds that let about the wanted number of entries pass, found without sorting the tensor.

Both return an int32 ``(1,)`` that compares with the bits of magnitudes (``Ops.top_indices_above``).
"""

from __future__ import annotations

import math

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.ops import exact, rng
from hvd_gradcomp.ops.base import Array

_SMALLEST_SAMPLE = 4096
_FLOOR = 2.0**-40  # of the largest magnitude: what is smaller counts as 0
_FACTOR = 8  # of the share that passes, from stage to stage
_AT_K = 4  # stages that aim at the wanted share itself


def sampled(keys: Array, k: int, ctx: Ctx) -> Array | None:
    """The key that about ``k`` of int32 ``keys`` reach, from the largest ones in a sample of 1 %
    (4,096 at least), one drawn from each of equal stretches. None where sampling saves nothing.

    Deep Gradient Compression takes the sample's k-th part; here it is three standard deviations
    further down, so that as a rule at least k pass. Source: Lin et al. (2018).
    """
    ops, n = ctx.ops, ctx.spec.numel
    size = max(n // 100, _SMALLEST_SAMPLE)
    if 2 * size > n:
        return None
    expected = k * size / n
    rank = min(size, math.ceil(expected + 3.0 * math.sqrt(expected) + 1.0))
    places = rng.sample(ops, n, size, seed=ctx.seed, spec=ctx.spec, step=ctx.state["step"], rank=ctx.rank)
    sample = ops.take(keys, places)
    return ops.min_rows(ops.reshape(ops.take(sample, ops.top_indices(sample, rank)), (1, rank)))


def statistical(x: Array, k: int, ctx: Ctx) -> Array:
    """The key that about ``k`` of float32 ``x`` reach, from sums over all of it.

    If magnitudes above t are ``t`` plus an exponential variable of mean m, ``c`` of them shrink to
    ``c'`` at ``t + m log(c / c')``. One such step from 0 misses the far tail of a gradient, so it
    is taken in stages, each 8 times nearer to k and fitted to what passed the one before, and then
    a few times more at k: from the last threshold that let k pass, or between it and one that let
    fewer pass, with the exponential through both. Source: SIDCo (Abdelmoniem et al. 2021), there
    with the counts that the fit expects; here with the true ones.
    """
    ops, n = ctx.ops, ctx.spec.numel
    sizes = ops.abs(x)
    largest = ops.max_rows(ops.reshape(sizes, (1, n)))
    down, up = blocks.powers(ops, largest)
    sizes, largest = sizes * down, largest * down
    sizes = ops.where(sizes < _FLOOR, 0.0 * sizes, sizes)
    stages = max(0, math.ceil(math.log(n / k, _FACTOR)) - 1)
    targets = [n / _FACTOR ** (stage + 1) for stage in range(stages)] + [float(k)] * _AT_K
    threshold = low = low_count = mean = high_count = 0.0 * largest
    high = largest  # high_count is 0 until a threshold let fewer than k pass
    for target in targets:
        count = blocks.total(ops, ops.cast(sizes >= threshold, "float32"))
        excess = blocks.total(ops, ops.maximum(sizes - threshold, 0.0))
        passed = count >= float(k)
        low, high = ops.where(passed, threshold, low), ops.where(passed, high, threshold)
        low_count, high_count = ops.where(passed, count, low_count), ops.where(passed, high_count, count)
        mean = ops.where(passed, excess / ops.maximum(count, 1.0), mean)
        wanted = exact.log(ops, low_count / ops.scalar(target))
        between = (high - low) / exact.log(ops, low_count / ops.maximum(high_count, 0.5))
        threshold = low + wanted * ops.where(high_count > 0.0, between, mean)
        threshold = ops.minimum(ops.maximum(threshold, low), high)
    return ops.bit_and(ops.bitcast(threshold * up, "int32"), 0x7FFFFFFF)
