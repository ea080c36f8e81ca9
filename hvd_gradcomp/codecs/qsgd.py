"""``qsgd``: stochastic levels of the share of the block's L2 norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.codecs.base import Claims, Codec, Ctx, is_int
from hvd_gradcomp.codecs.lanes import Lanes
from hvd_gradcomp.ops import bits as packing
from hvd_gradcomp.ops import exact, rng
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Qsgd(Codec):
    """``q = |x| / norm * levels``, rounded up with probability equal to its fraction; decodes to
    ``sign(x) q norm / levels``, where ``norm`` is the L2 norm of the block.

    The mean of the decodes is x; values on a level do not move. With error feedback the step that is
    sent is not ``norm / levels`` but the one that fits best, ``<|x|, q> / <q, q>``: no bytes more,
    and a decode that is never further from x than 0 is (few levels in a large block would otherwise
    make the residual grow without end).

    Args:
        levels: 1 to 32767 above zero.
        block: elements that share a norm; None for one per tensor.

    Bytes: ``(1 + ceil(log2(levels + 1))) / 8`` per element and 4 per block. Claims: unbiased without
    error feedback, contraction with it. Limits: blocks whose largest magnitude is below 2**-80 count
    as zeros; steps are cut at ``2**126 / levels``. Source: Alistarh et al. (2017), with fixed-width
    codes in place of Elias codes, whose length depends on the values.
    """

    name: ClassVar[str] = "qsgd"
    family: ClassVar[str] = "scalar"
    use: ClassVar[str] = "stochastic levels of the norm: unbiased, works without a residual"
    uses_step: ClassVar[bool] = True

    levels: int = 127
    block: int | None = 1024

    def __post_init__(self) -> None:
        self._require(is_int(self.levels, 1, 32767), "levels", "a whole number from 1 to 32767")
        self._require(self.block is None or is_int(self.block, 1), "block", "a whole number from 1, or None")

    @property
    def claims(self) -> Claims:  # type: ignore[override]
        # Some value is at least norm / sqrt(block). If that is a whole step, it is sent for certain.
        certain = self.block is not None and self.block < self.levels**2
        return Claims(unbiased=True, contraction=certain)

    @property
    def _bits(self) -> int:
        return 1 + self.levels.bit_length()

    def summed(self, ranks: int) -> Codec | None:
        """Its levels, of a step that the ranks share: one for the tensor, whatever ``block`` is."""
        return Lanes(self.levels, True, ranks)

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("step", blocks.count(spec.numel, self.block), "float32"),
                Part("codes", packing.packed_nbytes(spec.numel, self._bits), "uint8"))

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops, n = ctx.ops, ctx.spec.numel
        rows = blocks.rows(ops, ops.abs(x), self.block, edge=False)
        down, up = blocks.powers(ops, ops.max_rows(rows))
        rows = rows * blocks.spread(ops, down, n, self.block)  # the largest is now 1 to 2, if not 0
        norm = exact.root(ops, ops.maximum(ops.sum_rows(rows * rows), 1.0))
        step = norm / ops.scalar(self.levels)
        level = blocks.flat(ops, rows / blocks.spread(ops, step, n, self.block), n)
        nearest = ops.rint(level)
        # A value that stands on a level misses it by a rounding error: such a miss is no fraction.
        on_level = ops.abs(level - nearest) <= self.levels * 2.0**-22
        draws = rng.uniform(ops, n, seed=ctx.seed, spec=ctx.spec, step=ctx.state["step"], rank=ctx.rank)
        level = ops.where(on_level, nearest, ops.floor(level + draws))
        level = ops.minimum(level, float(self.levels))
        if ctx.error_feedback:
            q = blocks.rows(ops, level, self.block, edge=False)
            step = ops.sum_rows(rows * q) / ops.maximum(ops.sum_rows(q * q), 1.0)
        step = ops.minimum(step * up, blocks.HUGE / self.levels)
        codes = ops.bit_or(ops.cast(level, "int32"), ops.shift_left(blocks.signs(ops, x), self._bits - 1))
        # A NaN casts to anything: the mask keeps packing in bounds (the step is void anyway).
        codes = ops.bit_and(codes, 2**self._bits - 1)
        return {"step": step, "codes": packing.pack(ops, codes, self._bits)}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops, n = ctx.ops, ctx.spec.numel
        codes = packing.unpack(ops, parts["codes"], n, self._bits)
        sign = 1 - 2 * ops.shift_right(codes, self._bits - 1)
        level = ops.cast(sign * ops.bit_and(codes, 2 ** (self._bits - 1) - 1), "float32")
        step = blocks.spread(ops, parts["step"], n, self.block)
        return ops.accumulate(acc, blocks.flat(ops, blocks.rows(ops, level, self.block, edge=False) * step, n))
