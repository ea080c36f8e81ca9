"""``log``: levels whose distance grows with their size, so that small values keep their relative precision."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.codecs.base import Codec, Ctx, is_int, is_number
from hvd_gradcomp.ops import bits as packing
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Log(Codec):
    """``q = round(log2(1 + u / delta) / s)``, ``u = |x| / max|x|`` of the block, with the sign of x.

    Levels are ``v_i = delta (2**(s i) - 1)``, i from 0 to ``L = 2**(bits - 1) - 1``, where s makes
    ``v_L = 1``: the largest value and zero are exact. Far above delta neighboring levels have the
    ratio ``2**s = (1 + 1 / delta)**(1 / L)``; below delta they are equally spaced, ``v_1`` apart.
    A value goes to the nearest level (the upper one in the middle between two), so its error is at
    most half the step it lies in, and never more than the value itself.

    The formula rounds the logarithm; to round the value errs less and keeps the promise above. No
    logarithm is taken: it differs between frameworks, comparing with a table of middles does not.

    Args:
        bits: 2 to 16 per code, one of them the sign.
        delta: where the spacing turns from linear to logarithmic, relative to the block's largest
            magnitude; from 2**-24 to 1.
        block: elements that share a scale; None for one per tensor.

    Bytes: ``bits / 8`` per element and 4 per block. Limits: blocks whose largest magnitude is below
    2**-80 count as zeros. Source: companding as in ITU-T G.711; for gradients, logarithmic
    quantization as in Miyashita et al. (2016).
    """

    name: ClassVar[str] = "log"
    family: ClassVar[str] = "scalar"
    use: ClassVar[str] = "like uniform, but small values keep their relative error"
    vouching: ClassVar[tuple[str, ...]] = ("scale",)

    bits: int = 8
    delta: float = 0.001
    block: int | None = 1024

    def __post_init__(self) -> None:
        self._require(is_int(self.bits, 2, 16), "bits", "a whole number from 2 to 16")
        self._require(is_number(self.delta) and 2.0**-24 <= self.delta <= 1, "delta", "from 2**-24 to 1")
        self._require(self.block is None or is_int(self.block, 1), "block", "a whole number from 1, or None")

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("scale", blocks.count(spec.numel, self.block), "float32"),
                Part("codes", packing.packed_nbytes(spec.numel, self.bits), "uint8"))

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops, n = ctx.ops, ctx.spec.numel
        rows = blocks.rows(ops, ops.abs(x), self.block, edge=False)
        scale = blocks.scale(ops, ops.max_rows(rows))
        u = blocks.flat(ops, rows / blocks.spread(ops, blocks.divisor(ops, scale), n, self.block), n)
        middles = [(low + high) / 2 for low, high in pairwise(levels(self.bits, self.delta))]
        level = ops.count_at_most(u, ops.constant(middles, "float32"))
        codes = ops.bit_or(level, ops.shift_left(blocks.signs(ops, x), self.bits - 1))
        return {"scale": scale, "codes": packing.pack(ops, codes, self.bits)}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops, n = ctx.ops, ctx.spec.numel
        table = ops.constant(decoded(self.bits, self.delta), "float32")
        values = ops.take(table, packing.unpack(ops, parts["codes"], n, self.bits))
        scale = blocks.spread(ops, parts["scale"], n, self.block)
        return ops.accumulate(acc, blocks.flat(ops, blocks.rows(ops, values, self.block, edge=False) * scale, n))


@lru_cache(maxsize=16)
def levels(bits: int, delta: float) -> tuple[float, ...]:
    """``v_0 .. v_L``. In decimal arithmetic, whose digits are the same on every machine."""
    top = 2 ** (bits - 1) - 1
    with localcontext(prec=40):
        ratio = (1 + 1 / Decimal(delta)) ** (1 / Decimal(top))
        power, found = Decimal(1), []
        for _ in range(top):
            found.append(float(Decimal(delta) * (power - 1)))
            power *= ratio
    return (*found, 1.0)


def decoded(bits: int, delta: float) -> list[float]:
    """What every code stands for, relative to the scale: the levels, then their negatives."""
    positive = levels(bits, delta)
    return [*positive, *(-level for level in positive)]
