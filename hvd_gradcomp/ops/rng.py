"""The project's own random numbers: counter-based, the same bits in every framework.

A number depends on (seed, tensor name, step, rank or shared, stream, position) alone, so runs
repeat, a resumed run continues, and the user's generators are never touched. The mixing function
is a 32-bit multiply-xorshift finalizer in the manner of MurmurHash3 (Appleby 2011), with the
constants that Wellons found by search (2018, "lowbias32"), applied twice around the key.
"""

from __future__ import annotations

from functools import lru_cache

from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.spec import TensorSpec

SHARED = -1  # rank of numbers that all ranks have in common


def _int32(value: int) -> int:
    """The low 32 bits as a signed number: int32 arithmetic wraps in every framework."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(ops: Ops, x: Array) -> Array:
    x = ops.bit_xor(x, ops.shift_right(x, 16)) * _int32(0x7FEB352D)
    x = ops.bit_xor(x, ops.shift_right(x, 15)) * _int32(0x846CA68B)
    return ops.bit_xor(x, ops.shift_right(x, 16))


def scramble(ops: Ops, x: Array) -> Array:
    """For each int32 one of unrelated bits; no two give the same."""
    return _mix(ops, x)


def _mix_int(x: int) -> int:
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def keys(*, seed: int, spec: TensorSpec, step: int, rank: int, stream: int = 0) -> tuple[int, int]:
    """The two words that :func:`random_bits` mixes every position with, for kernels; each from 0 to 2**32 - 1."""
    first = _mix_int(step + _key(seed, spec, rank, stream))
    return first, _mix_int(first + 0x9E3779B9)


@lru_cache(maxsize=4096)  # the same in every step
def _key(seed: int, spec: TensorSpec, rank: int, stream: int) -> int:
    key = 0
    for word in (seed, seed >> 32, spec.crc, rank, stream):
        key = _mix_int(key ^ word) + 0x9E3779B9
    return key


def random_bits(ops: Ops, n: int, *, seed: int, spec: TensorSpec, step: Array, rank: int, stream: int = 0) -> Array:
    """``n`` int32 of 32 random bits each. ``step`` is an int32 ``(1,)`` array (it may be traced)."""
    # The step enters twice, differently mixed, so that no two steps share a shifted sequence.
    first = _mix(ops, step + _int32(_key(seed, spec, rank, stream)))
    second = _mix(ops, first + _int32(0x9E3779B9))
    return _mix(ops, ops.bit_xor(_mix(ops, ops.bit_xor(ops.arange(n), first)) + second, first))


def uniform(ops: Ops, n: int, *, seed: int, spec: TensorSpec, step: Array, rank: int, stream: int = 0) -> Array:
    """``n`` float32 in ``[0, 1)``, multiples of 2**-24: never exactly 1."""
    bits = random_bits(ops, n, seed=seed, spec=spec, step=step, rank=rank, stream=stream)
    return ops.cast(ops.shift_right(bits, 8), "float32") * 2.0**-24


def sample(ops: Ops, n: int, k: int, *, seed: int, spec: TensorSpec, step: Array, rank: int, stream: int = 0) -> Array:
    """``k`` distinct positions of ``0 .. n-1``, int32, in O(k).

    The range, cut in ``k`` strata whose lengths differ by at most one and rotated at random, gives
    one position per stratum. So each position comes with probability ``k / n``, also where ``k``
    does not divide ``n``: the rotation lets a position fall into a stratum of length L with
    probability proportional to L, and there it is drawn with probability 1 / L. (31 random bits
    taken modulo L or n: within ``(n / k + k) * 2**-31`` of it, relatively.)
    """
    bits = ops.shift_right(random_bits(ops, k + 1, seed=seed, spec=spec, step=step, rank=rank, stream=stream), 1)
    length, longer = divmod(n, k)  # the first `longer` strata have one more
    stratum = ops.arange(k)
    start = stratum * length + ops.minimum(stratum, longer)
    lengths = length + ops.cast(stratum < longer, "int32")
    place = start + bits[:k] % lengths - (n - bits[k:] % n)  # never above n: no overflow
    return place + n * ops.cast(place < 0, "int32")
