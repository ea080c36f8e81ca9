"""``sign``: one bit per element and one scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.codecs.base import Codec, Ctx, is_int
from hvd_gradcomp.ops import bits as packing
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

_TINY = 2.0**-90  # magnitudes below this count as 0: shares of them would be denormals


@dataclass(frozen=True)
class Sign(Codec):
    """``sign(x) * mean|x|`` per block; the sign of 0 is + by rule. Needs error feedback.

    Args:
        block: elements that share a scale; None for one scale per tensor.

    Bytes: 1/8 per element and 4 per block. Source: 1-bit SGD (Seide et al. 2014) in the scaled
    form of EF-signSGD (Karimireddy et al. 2019, Algorithm 1).
    """

    name: ClassVar[str] = "sign"
    family: ClassVar[str] = "scalar"
    use: ClassVar[str] = "1 bit per element with error feedback: 31 x"
    vouching: ClassVar[tuple[str, ...]] = ("scale",)

    block: int | None = 1024

    def __post_init__(self) -> None:
        self._require(self.block is None or is_int(self.block, 1), "block", "a whole number from 1, or None")

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("scale", blocks.count(spec.numel, self.block), "float32"),
                Part("signs", packing.packed_nbytes(spec.numel, 1), "uint8"))

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops, n = ctx.ops, ctx.spec.numel
        x = ops.flush(x, _TINY)
        magnitudes = blocks.rows(ops, ops.abs(x), self.block, edge=False)
        width = int(magnitudes.shape[1])
        in_last = n - (blocks.count(n, self.block) - 1) * width
        # Each term is divided first where the sum could overflow: a power of two rounds nothing.
        room = 2.0 ** -(width.bit_length())
        sums = ops.sum_rows(magnitudes * room)
        scale = ops.concat([ops.divide(sums[:-1], width * room), ops.divide(sums[-1:], in_last * room)])
        positive = ops.cast(x >= 0.0, "int32")
        return {"scale": scale, "signs": packing.pack(ops, positive, 1)}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops, n = ctx.ops, ctx.spec.numel
        signs = ops.cast(2 * packing.unpack(ops, parts["signs"], n, 1) - 1, "float32")
        rows = blocks.rows(ops, signs, self.block, edge=False) * blocks.spread(ops, parts["scale"], n, self.block)
        return ops.accumulate(acc, blocks.flat(ops, rows, n))
