"""``topk``: the entries of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs.base import Codec, Ctx, is_number
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class TopK(Codec):
    """The ``k = max(1, round(ratio * numel))`` entries of largest magnitude, values and indices.

    Exactly k, always; among equal magnitudes the lowest index goes first, so every framework
    selects the same entries. What was not sent stays in the residual.

    Args:
        ratio: share of the entries that is sent, above 0 and at most 1.

    Bytes: 8 k (float32 value, int32 index). Source: Aji and Heafield (2017).
    """

    name: ClassVar[str] = "topk"
    family: ClassVar[str] = "sparse"
    coded: ClassVar[tuple[str, ...]] = ("values",)

    ratio: float = 0.01

    def __post_init__(self) -> None:
        self._require(is_number(self.ratio) and 0 < self.ratio <= 1, "ratio", "above 0 and at most 1")

    def k(self, numel: int) -> int:
        """Number of entries sent of a tensor of ``numel``."""
        return min(numel, max(1, round(self.ratio * numel)))

    def layout(self, spec: TensorSpec) -> Layout:
        k = self.k(spec.numel)
        return (Part("values", k, "float32"), Part("indices", k, "int32"))

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops = ctx.ops
        # The bits of a magnitude, read as int32, are in the order of the magnitudes: comparing
        # them is exact where float comparisons differ (denormals are flushed in some frameworks).
        keys = ops.bit_and(ops.bitcast(x, "int32"), 0x7FFFFFFF)
        indices = ops.top_indices(keys, self.k(ctx.spec.numel))
        return {"values": ops.take(x, indices), "indices": indices}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return ctx.ops.scatter_add(acc, parts["indices"], parts["values"])
