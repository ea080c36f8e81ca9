"""Square root and logarithm from IEEE ``+ - * /`` alone: the same bits in every framework.

The frameworks' own differ in the last place, between devices too. For the few numbers that decide
bytes (a norm per block, a threshold per tensor); not made for whole tensors.
"""

from __future__ import annotations

import math

from hvd_gradcomp.ops.base import Array, Ops


def root(ops: Ops, x: Array) -> Array:
    """Square root of a float32 vector of values from 2**-100, to about one unit in the last place."""
    guess = ops.bitcast(ops.shift_right(ops.bitcast(x, "int32"), 1) + (127 << 22), "float32")  # within 7 %
    for _ in range(4):  # Newton's iteration doubles the correct digits each time
        guess = 0.5 * (guess + x / guess)
    return guess


def log(ops: Ops, x: Array) -> Array:
    """Natural logarithm of a float32 vector of values from 2**-100, within 1e-6 plus 1e-7 relative."""
    bits = ops.bitcast(x, "int32")
    exponent = ops.shift_right(bits, 23) - 127
    mantissa = ops.bitcast(ops.bit_and(bits, 0x7FFFFF) + (127 << 23), "float32")  # 1 to 2
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    series = z * 0.0 + 1.0 / 15.0  # log(mantissa) = 2 (z + z^3 / 3 + z^5 / 5 + ...), z below 1/3
    for n in range(13, 0, -2):
        series = series * square + 1.0 / n
    return ops.cast(exponent, "float32") * math.log(2.0) + 2.0 * (series * z)
