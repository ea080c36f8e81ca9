"""``topk``: the entries of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import indices, threshold
from hvd_gradcomp.codecs.base import Codec, Ctx, is_number
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

_THRESHOLDS = ("exact", "sampled", "statistical")
_INDICES = ("coded", "plain")
_MARGIN = 1.2  # the statistical threshold aims at this much more than k, being within 20 % as a rule


def kept(ratio: float, n: int) -> int:
    """Number of ``n`` things that a sparse codec sends: ``round(ratio * n)``, at least 1, at most n."""
    return min(n, max(1, round(ratio * n)))


@dataclass(frozen=True)
class TopK(Codec):
    """The ``k = max(1, round(ratio * numel))`` entries of largest magnitude, values and indices.

    Exactly k, always; among equal magnitudes the lowest index goes first, so every framework
    selects the same entries. What was not sent stays in the residual.

    Args:
        ratio: share of the entries that is sent, above 0 and at most 1.
        threshold: how they are found. ``"exact"``: by selection over all entries. ``"sampled"``: a
            threshold from a random sample of 1 %, then exact selection among the entries that reach
            it. ``"statistical"``: the same with a threshold fitted to the magnitudes' distribution.
            Where the estimate lets at least k pass, as it mostly does, the entries are the exact
            ones; where fewer pass, the entries with the lowest indices fill up, so that the payload
            has its size. Which is fastest depends on the device.
        index: ``"coded"``: about ``log2(1 / ratio) + 2`` bits each (``indices.py``); ``"plain"``: int32.

    Bytes: 4 k for the values and about ``(log2(1 / ratio) + 2) / 8 * k`` (plain: 4 k) for the indices.
    Source: Aji and Heafield (2017); thresholds: Lin et al. (2018), Abdelmoniem et al. (2021).
    """

    name: ClassVar[str] = "topk"
    family: ClassVar[str] = "sparse"
    use: ClassVar[str] = "only the largest entries; for slow links, with a warm-up"
    coded: ClassVar[tuple[str, ...]] = ("values",)
    sparse: ClassVar[bool] = True

    ratio: float = 0.01
    threshold: str = "exact"
    index: str = "coded"

    def __post_init__(self) -> None:
        self._require(is_number(self.ratio) and 0 < self.ratio <= 1, "ratio", "above 0 and at most 1")
        self._require(self.threshold in _THRESHOLDS, "threshold", f"one of {_THRESHOLDS}")
        self._require(self.index in _INDICES, "index", f"one of {_INDICES}")

    @property
    def vouching(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("values",) if self.threshold == "exact" else ()

    @property
    def uses_step(self) -> bool:  # type: ignore[override]
        return self.threshold == "sampled"

    def k(self, numel: int) -> int:
        """Number of entries sent of a tensor of ``numel``."""
        return kept(self.ratio, numel)

    def layout(self, spec: TensorSpec) -> Layout:
        k = self.k(spec.numel)
        index = (Part("indices", k, "int32"),) if self.index == "plain" else indices.layout(spec.numel, k)
        return (Part("values", k, "float32"), *index)

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops = ctx.ops
        chosen = self._choose(x, ctx)
        index = {"indices": chosen} if self.index == "plain" else indices.encode(ops, chosen, ctx.spec.numel)
        return {"values": ops.take(x, chosen), **index}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return ctx.ops.scatter_add(acc, *self.entries(parts, ctx))

    def entries(self, parts: Parts, ctx: Ctx) -> tuple[Array, Array]:
        n = ctx.spec.numel
        plain = self.index == "plain"
        return parts["indices"] if plain else indices.decode(ctx.ops, parts, n, self.k(n)), parts["values"]

    def _choose(self, x: Array, ctx: Ctx) -> Array:
        ops, n = ctx.ops, ctx.spec.numel
        k = self.k(n)
        # The bits of a magnitude, read as int32, are in the order of the magnitudes: comparing
        # them is exact where float comparisons differ (denormals are flushed in some frameworks).
        keys = ops.bit_and(ops.bitcast(x, "int32"), 0x7FFFFFFF)
        least = None
        if self.threshold == "sampled":
            least = threshold.sampled(keys, k, ctx)
        elif self.threshold == "statistical" and _MARGIN * k < n:
            least = threshold.statistical(x, round(_MARGIN * k), ctx)
        return ops.top_indices(keys, k) if least is None else ops.top_indices_above(keys, least, k)
