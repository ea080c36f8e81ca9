"""``ternary``: -1, 0 or 1 times one scale per block, five values to a byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.codecs.base import Claims, Codec, Ctx, is_int
from hvd_gradcomp.codecs.lanes import Lanes
from hvd_gradcomp.ops import bits as packing
from hvd_gradcomp.ops import rng
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Ternary(Codec):
    """``sign(x) max|x|`` with probability ``|x| / max|x|`` (of the block), else 0.

    The mean of the decodes is x; zeros and values as large as the largest do not move. With error
    feedback the same entries are kept but sent as ``sign(x)`` times their mean magnitude: no bytes
    more, and a decode that is always nearer to x than 0 is. (Sent as the largest magnitude they err by
    more than x where most values are far below it, and the residual becomes many times the gradient.)

    Args:
        block: elements that share a scale; None for one per tensor, as in the paper.

    Bytes: 1/5 per element (3**5 = 243 fit a byte) and 4 per block. Claims: unbiased without error
    feedback, contraction with it. Limits: blocks whose largest magnitude is below 2**-80 count as
    zeros. Source: TernGrad (Wen et al. 2017), without its clipping.
    """

    name: ClassVar[str] = "ternary"
    family: ClassVar[str] = "scalar"
    use: ClassVar[str] = "{-1, 0, 1}: unbiased at 20 x"
    claims: ClassVar[Claims] = Claims(unbiased=True)
    uses_step: ClassVar[bool] = True

    block: int | None = 1024

    def __post_init__(self) -> None:
        self._require(self.block is None or is_int(self.block, 1), "block", "a whole number from 1, or None")

    def summed(self, ranks: int) -> Codec | None:
        """Its levels, of a step that the ranks share: one for the tensor, whatever ``block`` is."""
        return Lanes(1, True, ranks)

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("scale", blocks.count(spec.numel, self.block), "float32"),
                Part("digits", packing.trits_nbytes(spec.numel), "uint8"))

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops, n = ctx.ops, ctx.spec.numel
        rows = blocks.rows(ops, ops.abs(x), self.block, edge=False)
        largest = ops.max_rows(rows)
        scale = blocks.scale(ops, largest)
        share = blocks.flat(ops, rows / blocks.spread(ops, blocks.divisor(ops, scale), n, self.block), n)
        draws = rng.uniform(ops, n, seed=ctx.seed, spec=ctx.spec, step=ctx.state["step"], rank=ctx.rank)
        kept = ops.minimum(ops.floor(share + draws), 1.0)
        if ctx.error_feedback:
            down, up = blocks.powers(ops, largest)
            kept_rows = blocks.rows(ops, kept, self.block, edge=False)
            sums = ops.sum_rows(rows * blocks.spread(ops, down, n, self.block) * kept_rows)
            scale = sums / ops.maximum(ops.sum_rows(kept_rows), 1.0) * up
        digits = 1 + ops.cast(kept, "int32") * (1 - 2 * blocks.signs(ops, x))
        return {"scale": scale, "digits": packing.pack_trits(ops, digits)}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops, n = ctx.ops, ctx.spec.numel
        digits = ops.cast(packing.unpack_trits(ops, parts["digits"], n) - 1, "float32")
        scale = blocks.spread(ops, parts["scale"], n, self.block)
        return ops.accumulate(acc, blocks.flat(ops, blocks.rows(ops, digits, self.block, edge=False) * scale, n))
