"""``sum``: payloads are added in flight and decoded once."""

from __future__ import annotations

from dataclasses import replace

from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.exchange.base import Exchange, Received, Rounds, Send
from hvd_gradcomp.ops.base import ITEMSIZE, Array
from hvd_gradcomp.spec import TensorSpec


class Sum(Exchange):
    """All-reduce of the payload, in its own dtypes; for codecs that claim ``summable``."""

    name = "sum"

    def allows(self, codec: Codec) -> str | None:
        return None if codec.summable else f"payloads of {codec} cannot be added in flight"

    def rounds(self, codec: Codec, x: Array, ctx: Ctx) -> Rounds:
        ops = ctx.ops
        if codec.uses_bound:
            local = ops.max_rows(ops.reshape(ops.abs(x), (1, ctx.spec.numel)))
            shared = yield Send({"bound": local}, "max")
            ctx = replace(ctx, bound=shared["bound"])
        own = codec.encode(x, ctx)
        del x
        total = yield Send(own, "sum")
        return Received(sent=lambda acc: codec.decode(own, acc, ctx),
                        mean=lambda acc: ops.divide(codec.decode(total, acc, ctx), ctx.ranks),
                        state=lambda: codec.advance(total, ctx))

    def sends(self, codec: Codec, spec: TensorSpec) -> list[tuple[str, int]]:
        bound = [("max", ITEMSIZE["float32"])] if codec.uses_bound else []
        return bound + [("sum", part.nbytes) for part in codec.layout(spec)]
