"""A vector as rows of one block each; padding that shows in no result."""

from __future__ import annotations

import math

from hvd_gradcomp.ops.base import Array, Ops

TINY = 2.0**-80
"""A block whose largest magnitude is below this is taken as zeros. It leaves room for the smallest
numbers of any use, 2**-46 of the largest, to be no denormals, which some frameworks flush."""
HUGE = 2.0**126
"""Steps and scales are cut so that no decoded value is above this (the rest stays in the residual)."""


def count(n: int, block: int | None) -> int:
    """Number of blocks of a vector of ``n`` elements; one if ``block`` is None."""
    return 1 if block is None else math.ceil(n / block)


def rows(ops: Ops, x: Array, block: int | None, edge: bool) -> Array:
    """``[blocks, block]``. The last row is filled with its last value (``edge``: changes no
    minimum or maximum) or with zeros (changes no sum)."""
    n = int(x.shape[0])
    blocks = count(n, block)
    width = n if block is None else block
    return ops.reshape(ops.pad(x, blocks * width, edge), (blocks, width))


def spread(ops: Ops, per_block: Array, n: int, block: int | None) -> Array:
    """Per-block values ``[blocks]`` as a column ``[blocks, 1]`` that broadcasts over :func:`rows`."""
    return ops.reshape(per_block, (count(n, block), 1))


def flat(ops: Ops, x: Array, n: int) -> Array:
    """The first ``n`` elements of ``[blocks, block]``: the vector without its padding."""
    return ops.reshape(x, (int(x.shape[0]) * int(x.shape[1]),))[:n]


def scale(ops: Ops, largest: Array) -> Array:
    """``largest`` of a block where it is at least TINY, else 0."""
    return ops.where(largest < TINY, 0.0 * largest, largest)


def divisor(ops: Ops, scales: Array) -> Array:
    """``scales`` to divide by: 1 where a scale is 0."""
    return ops.where(scales > 0.0, scales, scales + 1.0)


def powers(ops: Ops, largest: Array) -> tuple[Array, Array]:
    """Powers of two ``(down, up)`` with ``largest * down`` in 1 to 2 and ``up = 1 / down``, so that
    squares neither overflow nor vanish; both 0 for blocks that count as zeros."""
    field = ops.bit_and(ops.shift_right(ops.bitcast(largest, "int32"), 23), 255)
    field = ops.minimum(ops.maximum(field, 1), 253)  # so that neither power is a denormal
    down = ops.bitcast(ops.shift_left(254 - field, 23), "float32")
    up = ops.bitcast(ops.shift_left(field, 23), "float32")
    zeros = largest < TINY
    return ops.where(zeros, 0.0 * down, down), ops.where(zeros, 0.0 * up, up)


def signs(ops: Ops, x: Array) -> Array:
    """int32: 1 where the sign bit is set, else 0. (``x < 0`` differs between frameworks for denormals.)"""
    return ops.shift_right(ops.bitcast(x, "int32"), 31)


def total(ops: Ops, x: Array) -> Array:
    """Sum of a vector, as ``(1,)``, in a fixed order."""
    sums = ops.sum_rows(rows(ops, x, min(1024, int(x.shape[0])), edge=False))
    return ops.sum_rows(ops.reshape(sums, (1, int(sums.shape[0]))))
