"""A tensor in one chunk per rank, its owner, who adds the chunk for all: what ``two_stage`` and ``sparse_split``
have in common."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from hvd_gradcomp import coding, payload
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.exchange.base import Send
from hvd_gradcomp.memory.base import Memory
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Parts
from hvd_gradcomp.spec import TensorSpec


def specs(spec: TensorSpec, lengths: Sequence[int]) -> list[TensorSpec]:
    """Each chunk as a tensor (a vector) of its own."""
    return [TensorSpec(f"{spec.name}/{i}", (length,)) for i, length in enumerate(lengths)]


def width(codec: Codec, lengths: Sequence[int]) -> int:
    """Bytes of each chunk's row: those of the largest payload, because all rows of a collective are equal."""
    return max(payload.nbytes(codec.layout(TensorSpec("", (length,)))) for length in set(lengths) if length)


def state_name(name: str, i: int) -> str:
    """Where a codec's state array ``name`` for chunk ``i`` is kept."""
    return f"{name}/{i}"


class Chunks:
    """Encodes and decodes chunks; an empty one (there are more ranks than elements) is a row of zeros.

    first: how this rank codes each chunk. Every payload is decoded by itself, as in a world of one rank.
    second: how its owner codes its mean: with draws of its own, which no rank used before. Where ranks
        share their draws, the mean holds just what they pick once more, and is unbiased already.
    """

    def __init__(self, codec: Codec, ctx: Ctx, lengths: Sequence[int]) -> None:
        self._codec, self._ops = codec, ctx.ops
        self._width = width(codec, lengths)
        step = {"step": ctx.state["step"]} if "step" in ctx.state else {}
        self.first = [replace(ctx, spec=spec, ranks=1, buffers=ctx.buffers.setdefault(i, {}), state=step | {
            name: ctx.state[state_name(name, i)] for name in (codec.state(spec) if spec.numel else ())})
            for i, spec in enumerate(specs(ctx.spec, lengths))]
        self.second = [replace(chunk, rank=ctx.ranks + i, buffers=ctx.buffers.setdefault("mean", {}),
                               error_feedback=ctx.error_feedback or codec.summable)
                       for i, chunk in enumerate(self.first)]

    def encode(self, memory: Memory, chunk: Ctx) -> Array:
        """The row of one chunk, uint8 ``[width]``."""
        if not chunk.spec.numel:
            return self._ops.zeros((self._width,), "uint8")
        parts = coding.encode(self._codec, memory, chunk)
        return self._ops.pad(payload.pack(self._ops, parts, self._codec.layout(chunk.spec)), self._width)

    def unpack(self, row: Array, chunk: Ctx) -> Parts:
        """The payload in a row."""
        layout = self._codec.layout(chunk.spec)
        return payload.unpack(self._ops, row[: payload.nbytes(layout)], layout)

    def decode(self, row: Array, acc: Array, chunk: Ctx) -> Array:
        """``acc + decoded values``; ``acc`` is used up."""
        return coding.decode(self._codec, self.unpack(row, chunk), acc, chunk) if chunk.spec.numel else acc

    def mean(self, own: Sequence[Array], rank: int) -> Generator[Send, Parts, tuple[Array, Array]]:
        """All-to-all of rows; the mean over the ranks of chunk ``rank``, added in rank order, and a row of it."""
        rows = (yield Send({"chunks": self._ops.concat(own)}, "all_to_all"))["chunks"]
        chunk = self.first[rank]
        total = self._ops.zeros((chunk.spec.numel,))
        for sender in range(len(self.first)):
            total = self.decode(rows[sender], total, replace(chunk, rank=sender))
        return self._ops.divide(total, len(self.first)), rows[0]

    def share(self, row: Array) -> Generator[Send, Parts, list[Array]]:
        """All-gather of one row per rank."""
        rows = (yield Send({"means": row}, "gather"))["means"]
        return [rows[owner] for owner in range(len(self.first))]
