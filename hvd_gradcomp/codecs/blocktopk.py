"""``blocktopk``: the stretches, or whole rows, that hold the most energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import blocks, indices
from hvd_gradcomp.codecs.base import Codec, Ctx, is_int, is_number
from hvd_gradcomp.codecs.topk import kept
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

_FLOOR = 2.0**-40  # of the tensor's largest magnitude: smaller squares could become denormals


@dataclass(frozen=True)
class BlockTopK(Codec):
    """All values of the ``max(1, round(ratio * blocks))`` blocks with the largest sum of squares.

    Exactly that many, always; of equal blocks the one with the lowest index goes first. What was not
    sent stays in the residual.

    Args:
        ratio: share of the blocks that is sent, above 0 and at most 1.
        block: neighboring elements that are sent together.
        axis: None, or 0: the blocks are the rows of the first axis (filters, output channels,
            words of an embedding) and ``block`` has no effect.

    Bytes: 4 per value sent and about ``log2(1 / ratio) + 2`` bits per block (``indices.py``), so for
    blocks of 32 the indices are under 2 % of it. Limits: magnitudes below 2**-40 of the tensor's
    largest do not count for the choice. Source: block-sparse gradients as in Vogels et al. (2019,
    "random block", "top block") and Xu et al. (2021); rows: structured dropping as in Konecny et al.
    (2016).
    """

    name: ClassVar[str] = "blocktopk"
    family: ClassVar[str] = "sparse"
    use: ClassVar[str] = "the largest blocks or rows: cheap indices"
    coded: ClassVar[tuple[str, ...]] = ("values",)

    ratio: float = 0.01
    block: int = 32
    axis: int | None = None

    def __post_init__(self) -> None:
        self._require(is_number(self.ratio) and 0 < self.ratio <= 1, "ratio", "above 0 and at most 1")
        self._require(is_int(self.block, 1), "block", "a whole number from 1")
        self._require(self.axis is None or is_int(self.axis, 0, 0), "axis", "0 or None")

    @property
    def shaped(self) -> bool:  # type: ignore[override]
        return self.axis == 0

    def _sizes(self, spec: TensorSpec) -> tuple[int, int, int]:
        """(elements per block, blocks, blocks sent)."""
        width = self.block
        if self.axis == 0:
            width = spec.numel // spec.shape[0] if spec.shape else 1
        width = min(width, spec.numel)
        count = math.ceil(spec.numel / width)
        return width, count, kept(self.ratio, count)

    def layout(self, spec: TensorSpec) -> Layout:
        width, count, k = self._sizes(spec)
        return (Part("values", k * width, "float32"), *indices.layout(count, k))

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops, n = ctx.ops, ctx.spec.numel
        width, count, k = self._sizes(ctx.spec)
        rows = blocks.rows(ops, x, width, edge=False)
        down, _ = blocks.powers(ops, ops.max_rows(ops.reshape(ops.abs(x), (1, n))))
        sizes = ops.abs(rows) * down
        sizes = ops.where(sizes < _FLOOR, 0.0 * sizes, sizes)
        energy = ops.sum_rows(sizes * sizes)
        chosen = ops.top_indices(ops.bit_and(ops.bitcast(energy, "int32"), 0x7FFFFFFF), k)
        values = ops.reshape(ops.take(rows, chosen), (k * width,))
        return {"values": values, **indices.encode(ops, chosen, count)}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops, n = ctx.ops, ctx.spec.numel
        width, count, k = self._sizes(ctx.spec)
        first = ops.reshape(indices.decode(ops, parts, count, k) * width, (k, 1))
        places = ops.reshape(first + ops.reshape(ops.arange(width), (1, width)), (k * width,))
        values, padding = parts["values"], count * width - n
        if padding:
            # The last block's padding adds 0 to the last element; a place past the padding stays out of range.
            values = ops.where(places < n, values, 0.0)
            places = places - ops.minimum(ops.maximum(places - (n - 1), 0), padding)
        return ops.scatter_add(acc, places, values)
