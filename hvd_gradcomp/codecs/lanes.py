"""Whole levels of a step that all ranks share, several to an int32 word, so that an ordinary sum adds them.

No codec of its own name: what ``exchange="sum"`` makes of ``uniform``, ``qsgd`` and ``ternary``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.codecs.base import Claims, Codec, Ctx
from hvd_gradcomp.ops import rng
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

_WORD = 32


@dataclass(frozen=True)
class Lanes(Codec):
    """``q = round(x / s)``, cut at ``-levels .. levels``, ``s = bound / levels``; decodes to ``q s``.

    ``bound`` is the ranks' common one (``uses_bound``); what is larger is cut, and stays in the residual. With
    error feedback rounding is to the nearest level: chance would only enlarge what is kept, and with one level
    without end. Without it, ``stochastic`` rounds up with probability equal to the fraction.

    A word is ``sum of q_j 2**(j width)`` over its lanes, a plain integer: the sum of words is the word of the sums,
    as long as these fit ``width`` bits with their sign. Neighbors in a lane are neighbors in the tensor.

    Args:
        levels: above zero.
        stochastic: see above.
        ranks: how many words are added.

    Bytes: 4 for every ``32 // width`` elements, ``width = 1 + ceil(log2(ranks levels + 1))``.
    """

    name: ClassVar[str] = "lanes"
    family: ClassVar[str] = "scalar"
    claims: ClassVar[Claims] = Claims(summable=True)
    uses_bound: ClassVar[bool] = True
    uses_step: ClassVar[bool] = True

    levels: int
    stochastic: bool
    ranks: int

    @property
    def width(self) -> int:
        """Bits of a lane."""
        return 1 + (self.ranks * self.levels).bit_length()

    @property
    def lanes(self) -> int:
        """Lanes of a word."""
        return _WORD // self.width

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("words", -(-spec.numel // self.lanes), "int32"),)

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops, step = ctx.ops, self._step(ctx)
        level = x / blocks.divisor(ops, step)
        if self.stochastic and not ctx.error_feedback:
            nearest = ops.rint(level)
            # A value that stands on a level misses it by a rounding error: such a miss is no fraction.
            on_level = ops.abs(level - nearest) <= self.levels * 2.0**-22
            draws = rng.uniform(ops, ctx.spec.numel, seed=ctx.seed, spec=ctx.spec, step=ctx.state["step"],
                                rank=ctx.rank)
            level = ops.where(on_level, nearest, ops.floor(level + draws))
        else:
            level = ops.rint(level)
        level = ops.cast(ops.minimum(ops.maximum(level, -float(self.levels)), float(self.levels)), "int32")
        words = self._words(ctx.spec)
        level = ops.pad(level, self.lanes * words)
        total = level[:words]
        for lane in range(1, self.lanes):
            total = total + ops.shift_left(level[lane * words : (lane + 1) * words], lane * self.width)
        return {"words": total}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops, half = ctx.ops, 1 << (self.width - 1)
        # Half of its range more in every lane: none is negative then, and none borrows from the next one.
        shift = sum(half << (lane * self.width) for lane in range(self.lanes))
        words = parts["words"] + (shift - (1 << _WORD) if shift >> (_WORD - 1) else shift)
        lanes = [ops.bit_and(ops.shift_right(words, lane * self.width) if lane else words, 2 * half - 1)
                 for lane in range(self.lanes)]
        level = ops.concat(lanes)[: ctx.spec.numel] - half
        return ops.accumulate(acc, ops.cast(level, "float32") * self._step(ctx))

    def _step(self, ctx: Ctx) -> Array:
        """float32 ``(1,)``; 0 where the bound counts as 0, so that nothing is sent."""
        assert ctx.bound is not None
        bound = blocks.scale(ctx.ops, ctx.ops.minimum(ctx.bound, blocks.HUGE))
        return ctx.ops.divide(bound, self.levels)

    def _words(self, spec: TensorSpec) -> int:
        return self.layout(spec)[0].length
