"""``hierarchical``: dense inside a host, compressed between hosts."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.exchange.base import Exchange, Received, Rounds, Send, wire_bytes
from hvd_gradcomp.memory.base import Memory, NoMemory
from hvd_gradcomp.ops.base import ITEMSIZE, Array
from hvd_gradcomp.payload import Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Ranks ``0 .. local-1`` are one host, the next ``local`` another, and so on. All-reduce of the float32 values
    inside each host; then every rank takes its share of the host's mean, one in ``local``, and exchanges it,
    compressed, with the ranks that have the same share on the other hosts (``between``); all-gather of the
    shares inside the host. So a payload of the whole tensor leaves a host once, not once for each of its ranks.

    A rank counts as sent what it handed to its host, all of it, except that what was lost of the host's mean
    stays with the rank that took that share, ``local`` times. So the residual of a rank is zero but in its share,
    and the law is that of all exchanges: sum of outputs + mean of residuals = sum of mean gradients.

    A share is coded as a vector of its own: its shape is lost, and codecs that learn from step to step are refused.
    """

    local: int
    between: Exchange

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"hierarchical(local={self.local})"

    def allows(self, codec: Codec) -> str | None:
        if codec.state(TensorSpec("", (64, 64))):
            return f"{codec} learns from step to step, and would learn something else of every rank's share"
        return self.between.allows(codec)

    def groups(self, ranks: int) -> list[tuple[int, ...]]:
        return [*(_near(host * self.local, self.local) for host in range(ranks // self.local)),
                *(_far(place, self.local, ranks) for place in range(self.local))]

    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        ops, local, row = ctx.ops, self.local, self._longest(ctx.spec)
        host, place = divmod(ctx.rank, local)
        near, far = _near(ctx.rank, local), _far(ctx.rank, local, ctx.ranks)
        begin, end = (min(i * row, ctx.spec.numel) for i in (place, place + 1))
        # More ranks than elements: who has no share goes along with the first element, and drops the result.
        shown = slice(begin, end) if begin < end else slice(0, 1)

        total = (yield Send({"dense": memory.load()}, "sum", group=near))["dense"]
        share = total[shown] / ops.scalar(local)
        inner = replace(ctx, spec=TensorSpec(f"{ctx.spec.name}/{place}", (shown.stop - shown.start,)),
                        ranks=ctx.ranks // local, rank=host, buffers=ctx.buffers.setdefault("share", {}),
                        state={"step": ctx.state["step"]} if "step" in ctx.state else {})
        received = yield from _over(far, self.between.rounds(codec, NoMemory(ops, share), inner))
        mean = received.mean(ops.zeros((inner.spec.numel,)))
        means = (yield Send({"means": ops.pad(mean, row)}, "gather", group=near))["means"]

        def sent(acc: Array) -> Array:
            x = memory.load()
            if begin < end:
                lost = (share - received.sent(ops.zeros((end - begin,)))) * float(local)
                x = ops.concat([x[:begin], x[begin:end] - lost, x[end:]])
            return ops.accumulate(acc, x)

        def whole(acc: Array) -> Array:
            return ops.accumulate(acc, ops.reshape(means, (local * row,))[: ctx.spec.numel])

        return Received(sent=sent, mean=whole)

    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        size = ITEMSIZE["float32"]
        return [("sum", size * spec.numel), *self.between.sends(codec, self._share(spec), ranks // self.local),
                ("gather", size * self._longest(spec))]

    def received(self, codec: Codec, spec: TensorSpec, ranks: int) -> float:
        (_, dense), *_, (_, share) = self.sends(codec, spec, ranks)
        inside = wire_bytes("sum", dense, self.local) + wire_bytes("gather", share, self.local)
        return inside + self.crossing(codec, spec, ranks)

    def crossing(self, codec: Codec, spec: TensorSpec, ranks: int) -> float:
        """Those of the bytes that a rank receives which come from other hosts."""
        return self.between.received(codec, self._share(spec), ranks // self.local)

    def _share(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec(spec.name, (self._longest(spec),))

    def _longest(self, spec: TensorSpec) -> int:
        """Elements of each share but the last ones."""
        return math.ceil(spec.numel / self.local)


def _near(rank: int, local: int) -> tuple[int, ...]:
    """The ranks of a rank's host."""
    first = rank - rank % local
    return tuple(range(first, first + local))


def _far(rank: int, local: int, ranks: int) -> tuple[int, ...]:
    """The ranks in the same place on all hosts."""
    return tuple(range(rank % local, ranks, local))


def _over(group: tuple[int, ...], rounds: Rounds) -> Generator[Send, Parts, Received]:
    """The rounds of an exchange, over a group of ranks in place of all."""
    send = next(rounds)
    while True:
        answer = yield replace(send, group=group)
        try:
            send = rounds.send(answer)
        except StopIteration as end:
            return end.value
