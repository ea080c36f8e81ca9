"""``sum``: payloads are added in flight and decoded once."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from hvd_gradcomp import coding
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.exchange.base import Exchange, Received, Rounds, Send, converse
from hvd_gradcomp.memory.base import Memory
from hvd_gradcomp.ops.base import ITEMSIZE
from hvd_gradcomp.payload import Parts
from hvd_gradcomp.spec import TensorSpec


class Sum(Exchange):
    """All-reduce of the payload, in its own dtypes; for codecs whose rounds are ``summable_rounds``."""

    name = "sum"

    def allows(self, codec: Codec) -> str | None:
        return None if codec.summable_rounds else f"payloads of {codec} cannot be added in flight"

    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        if codec.interactive:
            return (yield from converse(codec, memory, ctx, self._send))
        if codec.uses_bound:
            shared = yield Send({"bound": coding.largest(memory, ctx)}, "max")
            ctx = replace(ctx, bound=shared["bound"])
        own = coding.encode(codec, memory, ctx)
        total = yield Send(own, "sum")
        return Received(sent=coding.Sent(codec, own, ctx),
                        mean=lambda acc: coding.mean(codec, [(total, ctx)], acc),
                        state=lambda: codec.advance(total, ctx))

    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        bound = [("max", ITEMSIZE["float32"])] if codec.uses_bound else []
        return bound + [("sum", part.nbytes) for layout in codec.round_layouts(spec) for part in layout]

    @staticmethod
    def _send(parts: Parts) -> Generator[Send, Parts, list[Parts]]:
        return [(yield Send(parts, "sum"))]
