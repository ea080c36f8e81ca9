"""Codes of 1 to 31 bits packed without gaps, least significant bit first; digits of base 3, five per byte."""

from __future__ import annotations

import math

from hvd_gradcomp.ops.base import Array, Ops


def packed_nbytes(n: int, bits: int) -> int:
    """Bytes of ``n`` codes: groups of 8 codes take ``bits`` bytes each."""
    return math.ceil(n / 8) * bits


def pack(ops: Ops, codes: Array, bits: int) -> Array:
    """uint8 ``[packed_nbytes(n, bits)]`` from int32 ``[n]`` codes in ``0 .. 2**bits - 1``."""
    groups = math.ceil(int(codes.shape[0]) / 8)
    codes = ops.pad(codes, 8 * groups)
    if bits == 8:
        return ops.cast(codes, "uint8")
    code = ops.reshape(codes, (groups, 8))
    columns = []
    for byte in range(bits):  # byte holds bits 8*byte .. 8*byte+7 of the group's stream
        value = None
        for i in range(8 * byte // bits, min(8, (8 * byte + 7) // bits + 1)):
            value = _or(ops, value, _shift(ops, code[:, i], i * bits - 8 * byte))
        columns.append(ops.bit_and(value, 255))
    return ops.reshape(ops.cast(ops.stack_columns(columns), "uint8"), (groups * bits,))


def unpack(ops: Ops, packed: Array, n: int, bits: int) -> Array:
    """int32 ``[n]`` codes from uint8 ``[packed_nbytes(n, bits)]``."""
    if bits == 8:
        return ops.cast(packed[:n], "int32")
    groups = int(packed.shape[0]) // bits
    byte = ops.cast(ops.reshape(packed, (groups, bits)), "int32")
    columns = []
    for i in range(8):
        value = None
        for j in range(i * bits // 8, ((i + 1) * bits - 1) // 8 + 1):
            value = _or(ops, value, _shift(ops, byte[:, j], 8 * j - i * bits))
        columns.append(ops.bit_and(value, (1 << bits) - 1))
    return ops.reshape(ops.stack_columns(columns), (groups * 8,))[:n]


def trits_nbytes(n: int) -> int:
    """Bytes of ``n`` digits of base 3: five to a byte (3**5 = 243)."""
    return math.ceil(n / 5)


def pack_trits(ops: Ops, digits: Array) -> Array:
    """uint8 ``[trits_nbytes(n)]`` from int32 ``[n]`` digits 0, 1, 2."""
    groups = trits_nbytes(int(digits.shape[0]))
    digit = ops.reshape(ops.pad(digits, 5 * groups), (groups, 5))
    value = digit[:, 4]
    for i in (3, 2, 1, 0):
        value = 3 * value + digit[:, i]
    return ops.cast(ops.bit_and(value, 255), "uint8")


def unpack_trits(ops: Ops, packed: Array, n: int) -> Array:
    """int32 ``[n]`` digits 0, 1, 2, whatever the bytes."""
    value = ops.cast(packed, "int32")
    columns = []
    for _ in range(4):
        third = ops.shift_right(value * 171, 9)  # value // 3 for values to 255
        columns.append(value - 3 * third)
        value = third
    columns.append(ops.minimum(value, 2))  # 243 .. 255 are no code
    return ops.reshape(ops.stack_columns(columns), (int(packed.shape[0]) * 5,))[:n]


def _shift(ops: Ops, x: Array, bits: int) -> Array:
    if bits == 0:
        return x
    return ops.shift_left(x, bits) if bits > 0 else ops.shift_right(x, -bits)


def _or(ops: Ops, x: Array | None, y: Array) -> Array:
    return y if x is None else ops.bit_or(x, y)
