"""``natural``: powers of two, one byte each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.codecs.base import Claims, Codec, Ctx
from hvd_gradcomp.ops import rng
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

_LARGEST = 0x7F7FFFFF  # bits of the largest finite float32
_SMALLEST = 1 << 23  # of the smallest that is no denormal


@dataclass(frozen=True)
class Natural(Codec):
    """The power of two above or below ``|x|``, at random so that the mean of the decodes is x.

    x's own bits do it: a random number of 23 bits is added to the mantissa, and its carry raises the
    exponent with a probability equal to the fraction, exactly. A power of two has no mantissa and
    never moves. The relative variance is at most 1/8.

    One sign bit and 7 bits of exponent hold zero and 127 powers: from 2**-126 to 1, or the 127 that
    end with the tensor's largest if that is above 1, as one byte per tensor says.

    Bytes: 1 per element and 1 per tensor. Limits: what is more than 2**126 times smaller than the
    largest becomes 0, as do denormals; magnitudes above 2**127 are cut there. Source: natural
    compression (Horvath et al. 2019).
    """

    name: ClassVar[str] = "natural"
    family: ClassVar[str] = "scalar"
    use: ClassVar[str] = "powers of two: unbiased, one byte per element"
    claims: ClassVar[Claims] = Claims(unbiased=True)
    uses_step: ClassVar[bool] = True

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("codes", spec.numel, "uint8"), Part("base", 1, "uint8"))

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops, n = ctx.ops, ctx.spec.numel
        magnitude = ops.minimum(ops.bit_and(ops.bitcast(x, "int32"), 0x7FFFFFFF), _LARGEST)
        magnitude = magnitude * ops.cast(magnitude >= _SMALLEST, "int32")
        random = rng.random_bits(ops, n, seed=ctx.seed, spec=ctx.spec, step=ctx.state["step"], rank=ctx.rank)
        exponent = ops.minimum(ops.shift_right(magnitude + ops.shift_right(random, 9), 23), 254)
        base = ops.maximum(ops.max_rows(ops.reshape(exponent, (1, n))) - 127, 0)
        codes = ops.maximum(exponent - base, 0)
        codes = ops.bit_or(codes, ops.shift_left(blocks.signs(ops, x), 7))
        return {"codes": ops.cast(codes, "uint8"), "base": ops.cast(base, "uint8")}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops = ctx.ops
        codes = ops.cast(parts["codes"], "int32")
        code = ops.bit_and(codes, 127)
        exponent = ops.bit_and(code + ops.cast(parts["base"], "int32"), 255) * ops.minimum(code, 1)
        sign = ops.shift_left(ops.shift_right(codes, 7), 31)
        return ops.accumulate(acc, ops.bitcast(ops.bit_or(ops.shift_left(exponent, 23), sign), "float32"))
