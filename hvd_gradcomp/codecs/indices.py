"""Coded indices: ``k`` ascending ones below ``n`` in about ``log2(n / k) + 2`` bits each.

The Elias-Fano code: with ``l = floor(log2(n / k))``, the low l bits of each index are packed as they
are, and the high part h_j of the j-th, which never falls, sets bit ``h_j + j`` of a bitmap. The
bitmap has ``k + (n - 1) // 2**l`` bits, at most ``3 k``: the size follows from n and k alone.
Source: Elias (1974), Fano (1971).
"""

from __future__ import annotations

import math

from hvd_gradcomp.ops import bits as packing
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.payload import Layout, Part, Parts


def _low_bits(n: int, k: int) -> int:
    return (n // k).bit_length() - 1


def _bitmap_bits(n: int, k: int) -> int:
    return k + ((n - 1) >> _low_bits(n, k))


def layout(n: int, k: int) -> Layout:
    """The parts ``index_high`` and, unless it would be empty, ``index_low``; 1 <= k <= n."""
    low = packing.packed_nbytes(k, _low_bits(n, k))
    high = Part("index_high", math.ceil(_bitmap_bits(n, k) / 8), "uint8")
    return (high, Part("index_low", low, "uint8")) if low else (high,)


def encode(ops: Ops, indices: Array, n: int) -> Parts:
    """The parts of :func:`layout` from int32 ``[k]``, ascending, below ``n``."""
    k = int(indices.shape[0])
    low = _low_bits(n, k)
    place = ops.shift_right(indices, low) + ops.arange(k)
    bit = ops.take(ops.constant([2.0**i for i in range(8)], "float32"), ops.bit_and(place, 7))
    empty = ops.zeros((math.ceil(_bitmap_bits(n, k) / 8),))
    parts = {"index_high": ops.cast(ops.scatter_add(empty, ops.shift_right(place, 3), bit), "uint8")}
    if low:
        parts["index_low"] = packing.pack(ops, ops.bit_and(indices, 2**low - 1), low)
    return parts


def decode(ops: Ops, parts: Parts, n: int, k: int) -> Array:
    """int32 ``[k]``. Whatever the bytes they are not negative, but they may be above ``n - 1``:
    :meth:`Ops.scatter_add` checks. Raises as :meth:`Ops.ones` does if there are not k."""
    low = _low_bits(n, k)
    bitmap = packing.unpack(ops, parts["index_high"], _bitmap_bits(n, k), 1)
    indices = ops.shift_left(ops.ones(bitmap, k) - ops.arange(k), low)
    if low:
        indices = ops.bit_or(indices, packing.unpack(ops, parts["index_low"], k, low))
    return indices
