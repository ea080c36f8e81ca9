"""``sum``: payloads are added in flight and decoded once."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from hvd_gradcomp import coding
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.exchange.base import Exchange, Received, Rounds, Send, converse
from hvd_gradcomp.memory.base import Memory
from hvd_gradcomp.ops.base import ITEMSIZE, Array
from hvd_gradcomp.payload import Parts
from hvd_gradcomp.spec import TensorSpec

BOUND = "sum_bound"

_FORGET = 0.5
_HUGE = 2.0**120  # times a codec's headroom this is no infinity


@dataclass(frozen=True)
class Sum(Exchange):
    """All-reduce of the payload, in its own dtypes; for codecs whose rounds are ``summable_rounds``. In place of
    others goes what they make of themselves (:meth:`Codec.summed`): levels of a step that all ranks share.

    What a codec that ``uses_bound`` is scaled by, all ranks must have in common. In the first step they ask for the
    largest magnitude of all, which takes a round. From then on (``delayed``) they go by the earlier steps':
    the state array ``sum_bound``, the same on every rank, holds the largest of the step before, or half of
    what it held if that is more; this step's comes along with the payload. What exceeds the bound is
    clipped: it stays in the residual, and the next bound is larger.
    """

    name = "sum"

    delayed: bool = False

    def allows(self, codec: Codec) -> str | None:
        return None if codec.summed(2) else f"payloads of {codec} cannot be added in flight"

    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        if codec.interactive:
            return (yield from converse(codec, memory, ctx, self._send))
        codec, ops = _summed(codec, ctx.ranks), ctx.ops
        largest = {"bound": coding.largest(memory, ctx)} if codec.uses_bound else {}
        finite = bool(largest) and coding.is_finite(largest["bound"], ctx)
        before = ctx.state.get(BOUND) if codec.uses_bound else None
        if self.delayed:
            ctx = replace(ctx, bound=ops.minimum(before, _HUGE) * codec.headroom)
        elif largest:
            shared = yield Send(largest, "max", finite=finite)
            ctx, largest = replace(ctx, bound=shared["bound"]), {}
        own = coding.encode(codec, memory, ctx)
        total = dict((yield Send(own, "sum", largest, finite=finite)))
        bound = total.pop("bound", ctx.bound)

        def state() -> dict[str, Array]:
            new = codec.advance(total, ctx)
            if before is None:
                return new
            return {**new, BOUND: ops.maximum(bound, before * _FORGET)}

        return Received(sent=coding.Sent(codec, own, ctx), mean=lambda acc: coding.mean(codec, [(total, ctx)], acc),
                        state=state, covers=coding.covers(codec, ctx))

    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        codec = _summed(codec, ranks)
        bound = [("max", ITEMSIZE["float32"])] if codec.uses_bound else []
        return bound + [("sum", part.nbytes) for layout in codec.round_layouts(spec) for part in layout]

    def state(self, codec: Codec, spec: TensorSpec, ranks: int, memory: bool) -> dict[str, tuple[int, str]]:
        own = {BOUND: (1, "float32")} if self.delayed else {}
        return own | super().state(codec, spec, ranks, memory)

    @staticmethod
    def delays(codec: Codec, ranks: int) -> bool:
        """Whether there is a bound to go by."""
        return _summed(codec, ranks).uses_bound

    @staticmethod
    def _send(parts: Parts) -> Generator[Send, Parts, list[Parts]]:
        return [(yield Send(parts, "sum"))]


def _summed(codec: Codec, ranks: int) -> Codec:
    summed = codec.summed(ranks)
    assert summed is not None
    return summed
