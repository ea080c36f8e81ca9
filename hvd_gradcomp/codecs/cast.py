"""``fp16`` and ``bf16``: two bytes per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs.base import Claims, Codec, Ctx
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

_FP16_MAX = 65504.0
_EXPONENT = 0x7F800000  # of a float32's bits
_BF16_MAX = 0x7F7F0000  # bits of the largest finite bfloat16


@dataclass(frozen=True)
class Fp16(Codec):
    """IEEE half precision, scaled so that the sum over ranks neither overflows nor flushes to zero.

    ``scale`` is the largest power of two with ``scale * ranks * bound <= 2**15``, where ``bound``
    is the largest magnitude on any rank (one small max all-reduce; after the first step the bound of the
    step before, 16 times, so that nothing waits for it: what is above is clipped and kept); the payload is
    ``half(x * scale)``, the mean ``sum / (scale * ranks)``. A power of two, so scaling itself
    rounds nothing. Adding ``ranks`` halves in flight rounds each partial sum by at most
    ``2**-11`` relative; that part reaches no residual (it is known to no rank).
    Behind another codec (``powersgd + fp16``) no bound is exchanged: ``scale`` is the power of two
    not above ``1 / ranks``, and what would overflow is clipped and kept in the residual.

    Bytes: 2 per element. Source: mixed-precision training's loss scaling (Micikevicius et al.
    2018), here per tensor and exact.
    """

    name: ClassVar[str] = "fp16"
    family: ClassVar[str] = "cast"
    use: ClassVar[str] = "a safe first step: half the bytes, no visible change"
    claims: ClassVar[Claims] = Claims(summable=True)
    uses_bound: ClassVar[bool] = True
    headroom: ClassVar[float] = 16.0

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("values", spec.numel, "float16"),)

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        limit = self.limit(ctx)
        scaled = ctx.ops.minimum(ctx.ops.maximum(x * self.scale(ctx), -limit), limit)
        return {"values": ctx.ops.cast(scaled, "float16")}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return ctx.ops.accumulate(acc, ctx.ops.cast(parts["values"], "float32") / self.scale(ctx))

    def limit(self, ctx: Ctx) -> float:
        """Where scaled values are cut. With a bound only what would round up to 2**15: of the largest
        float32s that decodes to infinity."""
        return _FP16_MAX / ctx.ranks if ctx.bound is None else (2.0**15 - 16) / 2 ** _shift(ctx.ranks)

    def scale(self, ctx: Ctx) -> Array:
        """float32 ``(1,)``: what values are multiplied by."""
        shift = _shift(ctx.ranks)
        if ctx.bound is None:
            return ctx.ops.constant([2.0**-shift], "float32")
        ops = ctx.ops
        # bound <= 2**(exponent + 1), so scale = 2**(14 - shift - exponent). Its exponent field is
        # kept in 1..228: neither it nor its inverse is a denormal, and denormals, which TensorFlow
        # takes as 0, are 0 in half precision even when scaled.
        field = ops.shift_right(ops.bit_and(ops.bitcast(ops.abs(ctx.bound), "int32"), _EXPONENT), 23)
        field = ops.minimum(ops.maximum((127 + 14 - shift + 127) - field, 1), 228)
        return ops.bitcast(ops.shift_left(field, 23), "float32")


def _shift(ranks: int) -> int:
    """The smallest ``shift`` with ``ranks <= 2**shift``."""
    return (ranks - 1).bit_length()


@dataclass(frozen=True)
class Bf16(Codec):
    """bfloat16: the upper half of a float32, rounded half to even. Range of float32, 8 bits of
    precision.

    No transport of Horovod carries bfloat16, so the bits travel as int16 and are gathered, not
    summed. A finite value never rounds up to infinity. Bytes: 2 per element.
    """

    name: ClassVar[str] = "bf16"
    family: ClassVar[str] = "cast"
    use: ClassVar[str] = "half the bytes with the range of float32; gathered"
    claims: ClassVar[Claims] = Claims()

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("values", spec.numel, "int16"),)

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops = ctx.ops
        bits = ops.bitcast(x, "int32")  # all on the bits: float operations of TensorFlow flush denormals
        magnitude = ops.minimum(ops.bit_and(bits, 0x7FFFFFFF), _BF16_MAX)
        odd = ops.bit_and(ops.shift_right(magnitude, 16), 1)
        rounded = ops.shift_right(magnitude + (odd + 0x7FFF), 16)
        return {"values": ops.cast(rounded - 0x8000 * ops.shift_right(bits, 31), "int16")}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops = ctx.ops
        bits = ops.shift_left(ops.cast(parts["values"], "int32"), 16)
        return ops.accumulate(acc, ops.bitcast(bits, "float32"))
