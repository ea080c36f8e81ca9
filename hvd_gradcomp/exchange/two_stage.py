"""``two_stage``: every rank adds one chunk of the tensor for all, so that cost does not grow with their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvd_gradcomp import coding
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.exchange import chunks
from hvd_gradcomp.exchange.base import Exchange, Received, Rounds
from hvd_gradcomp.memory.base import Memory
from hvd_gradcomp.memory.error_feedback import ErrorFeedback
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.spec import TensorSpec

OWNER = "owner_residual"


def bounds(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Begin and end of each rank's chunk; lengths differ by at most one."""
    return [(i * numel // ranks, (i + 1) * numel // ranks) for i in range(ranks)]


@dataclass(frozen=True)
class TwoStage(Exchange):
    """All-to-all of the chunks' payloads; each chunk's owner decodes them, adds in float32 in rank order,
    and encodes the mean again; all-gather; decode. Costs two payloads per rank at any N.

    Carries every codec: a chunk is coded as a vector of its own, so what a codec makes of the tensor's
    shape is lost. Its state (a codebook, a warm start) is kept for each chunk and follows the means.

    What the second encoding loses is kept in the state array ``owner_residual``, as long as the longest
    chunk, and added to the chunk's next mean. ``sent`` is what the first encoding holds; so in the law the
    owners' residuals, one behind the other, are added to the *mean* of the ranks' residuals: sum of
    outputs + mean of ``residual`` + ``owner_residual`` of all owners = sum of mean gradients. While a
    schedule's stage uses another exchange they wait. With ``owner_memory=False`` there is no such array: the
    owner takes N times that loss back from what it counts as sent, as in ``sparse_split``.

    Source: the compressed all-reduce of 1-bit Adam (Tang et al. 2021).
    """

    name = "two_stage"

    owner_memory: bool = True

    def allows(self, codec: Codec) -> str | None:
        return None

    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        ops, cuts = ctx.ops, bounds(ctx.spec.numel, ctx.ranks)
        coder = chunks.Chunks(codec, ctx, _lengths(ctx.spec, ctx.ranks))
        mine = coder.second[ctx.rank]

        own = [coder.encode(memory.part(*cut), chunk) for cut, chunk in zip(cuts, coder.first, strict=True)]
        mean, row = yield from coder.mean(own, ctx.rank)
        owner = memory.second(mean, ctx.state[OWNER][: mine.spec.numel] if memory.keeps and self.owner_memory else None)
        # An empty chunk sends the zeros that came: TensorFlow runs a collective of constants while it traces.
        again = coder.encode(owner, mine) if mine.spec.numel else row
        means = yield from coder.share(again)

        def sent(i: int) -> Callable[[Array], Array]:
            """What is counted as sent of chunk ``i``."""
            first = coder.first[i]
            if self.owner_memory or i != ctx.rank:
                return coding.Sent(codec, coder.unpack(own[i], first), first)
            return lambda acc: ops.accumulate(coder.decode(own[i], acc, first), (
                coder.decode(again, ops.zeros((mine.spec.numel,)), mine) - mean) * float(ctx.ranks))

        stretches = [(*cut, sent(i)) for i, cut in enumerate(cuts) if cut[0] < cut[1]]

        def whole(acc: Array) -> Array:
            return ops.concat([coder.decode(means[i], acc[begin:end], coder.second[i])
                               for i, (begin, end) in enumerate(cuts) if begin < end])

        def state() -> dict[str, Array]:
            new = {}
            if isinstance(owner, ErrorFeedback):
                kept = owner.kept(coder.decode(again, ops.zeros((mine.spec.numel,)), mine))
                new[OWNER] = ops.pad(kept, _longest(ctx.spec, ctx.ranks))
            for i, chunk in enumerate(coder.second):
                if chunk.spec.numel and codec.state(chunk.spec):
                    parts = coder.unpack(means[i], chunk)
                    if not (codec.summable or codec.interactive):  # as all payloads of a world of one rank
                        parts = {name: ops.reshape(part, (1, -1)) for name, part in parts.items()}
                    new |= {chunks.state_name(name, i): array for name, array in codec.advance(parts, chunk).items()}
            return new

        return Received(sent=lambda acc: ops.concat([each(acc[begin:end]) for begin, end, each in stretches]),
                        mean=whole, state=state, stretches=stretches)

    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        row = chunks.width(codec, _lengths(spec, ranks))
        return [("all_to_all", ranks * row), ("gather", row)]

    def state(self, codec: Codec, spec: TensorSpec, ranks: int, memory: bool) -> dict[str, tuple[int, str]]:
        own = {OWNER: (_longest(spec, ranks), "float32")} if memory and self.owner_memory else {}
        return own | {chunks.state_name(name, i): layout
                      for i, chunk in enumerate(chunks.specs(spec, _lengths(spec, ranks))) if chunk.numel
                      for name, layout in codec.state(chunk).items()}


def _lengths(spec: TensorSpec, ranks: int) -> list[int]:
    return [stop - start for start, stop in bounds(spec.numel, ranks)]


def _longest(spec: TensorSpec, ranks: int) -> int:
    return -(-spec.numel // ranks)
