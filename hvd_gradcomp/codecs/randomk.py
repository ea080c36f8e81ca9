"""``randomk``: entries chosen by chance, whose indices need not travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs.base import Claims, Codec, Ctx, is_number
from hvd_gradcomp.codecs.topk import kept
from hvd_gradcomp.ops import rng
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class RandomK(Codec):
    """``k = max(1, round(ratio * numel))`` distinct entries, each with probability ``k / numel``,
    drawn anew each step by the project's generator (one from each of k equal stretches, see
    ``rng.sample``): receivers draw the same indices again.

    Without error feedback the values are decoded ``numel / k`` times as large, so that their mean is
    x. With it they are not: what was not chosen waits in the residual.

    Args:
        ratio: share of the entries that is sent, above 0 and at most 1.
        shared: True: all ranks send the same entries, so payloads are summed in flight. False: each
            rank its own (more entries get something in a step), and payloads are gathered.

    Bytes: 4 k. Claims: unbiased without error feedback. An error-feedback contraction only in the
    mean over draws, by ``1 - k / numel``: one draw may meet nothing but zeros. Source: Stich et
    al. (2018), Konecny et al. (2016).
    """

    name: ClassVar[str] = "randomk"
    family: ClassVar[str] = "sparse"
    use: ClassVar[str] = "random entries that all ranks share: summed, nearly free to encode"
    coded: ClassVar[tuple[str, ...]] = ("values",)
    uses_step: ClassVar[bool] = True

    ratio: float = 0.01
    shared: bool = True

    def __post_init__(self) -> None:
        self._require(is_number(self.ratio) and 0 < self.ratio <= 1, "ratio", "above 0 and at most 1")
        self._require(type(self.shared) is bool, "shared", "True or False")

    @property
    def claims(self) -> Claims:  # type: ignore[override]
        return Claims(unbiased=True, contraction=False, summable=self.shared)

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("values", kept(self.ratio, spec.numel), "float32"),)

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        return {"values": ctx.ops.take(x, self._indices(ctx))}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        values = parts["values"]
        if not ctx.error_feedback:
            values = values * (ctx.spec.numel / kept(self.ratio, ctx.spec.numel))
        return ctx.ops.scatter_add(acc, self._indices(ctx), values)

    def _indices(self, ctx: Ctx) -> Array:
        n = ctx.spec.numel
        return rng.sample(ctx.ops, n, kept(self.ratio, n), seed=ctx.seed, spec=ctx.spec, step=ctx.state["step"],
                          rank=rng.SHARED if self.shared else ctx.rank)
