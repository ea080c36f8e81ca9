"""``gather``: every payload goes to everyone and is decoded into one accumulator."""

from __future__ import annotations

from collections.abc import Generator

from hvd_gradcomp import coding, payload
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.exchange.base import Exchange, Received, Rounds, Send, converse
from hvd_gradcomp.memory.base import Memory
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Part, Parts
from hvd_gradcomp.spec import TensorSpec

_PART = "payload"


class Gather(Exchange):
    """All-gather of one byte buffer per rank; decoded in rank order, so every rank gets the same
    bits, run after run. Costs ``N - 1`` payloads per rank."""

    name = "gather"

    def allows(self, codec: Codec) -> str | None:
        return None

    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        ops, layout = ctx.ops, coding.layout(codec, ctx)
        if codec.interactive:
            def send(parts: Parts) -> Generator[Send, Parts, list[Parts]]:
                sent = tuple(Part(name, int(array.shape[0]), ops.dtype(array)) for name, array in parts.items())
                everyone = (yield Send({_PART: payload.pack(ops, parts, sent)}, "gather"))[_PART]
                return [payload.unpack(ops, everyone[rank], sent) for rank in range(ctx.ranks)]

            return (yield from converse(codec, memory, ctx, send))
        parts = coding.encode(codec, memory, ctx)
        own = payload.pack(ops, parts, layout)
        everyone = (yield Send({_PART: own}, "gather", finite=coding.vouched(codec, parts, ctx)))[_PART]

        def mean(acc: Array) -> Array:
            return coding.mean(codec, [(payload.unpack(ops, everyone[rank], layout), ctx.of(rank))
                                       for rank in range(ctx.ranks)], acc)

        def state() -> dict[str, Array]:
            if not codec.state(ctx.spec):
                return {}
            each = [payload.unpack(ops, everyone[rank], layout) for rank in range(ctx.ranks)]
            parts = {part.name: ops.reshape(ops.concat([parts[part.name] for parts in each]), (ctx.ranks, part.length))
                     for part in layout}
            return codec.advance(parts, ctx)

        return Received(sent=coding.Sent(codec, payload.unpack(ops, own, layout), ctx), mean=mean, state=state,
                        covers=coding.covers(codec, ctx))

    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        return [("gather", payload.nbytes(layout)) for layout in codec.round_layouts(spec)]
