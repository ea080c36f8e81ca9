"""``sparse_split``: an all-reduce of the largest entries that costs O(k) at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hvd_gradcomp import coding
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.codecs.chain import Chain
from hvd_gradcomp.codecs.topk import TopK
from hvd_gradcomp.exchange import chunks
from hvd_gradcomp.exchange.base import Exchange, Received, Rounds
from hvd_gradcomp.exchange.regions import Regions
from hvd_gradcomp.memory.base import Memory, NoMemory
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.spec import TensorSpec


class SparseSplit(Exchange):
    """All-to-all: each rank sends the largest entries of every region to its owner, who adds them; all-gather:
    the owner sends the largest of the sums. Regions are dealt out evenly (``regions.py``) and of one length,
    so every message has its fixed share of the k entries; indices are relative to the region.

    An entry leaves a rank's residual only if it was sent *and* survived the owner's choice; all others stay
    for later steps. What coding the survivors' means costs (``topk + uniform``; nothing for ``topk`` alone)
    is taken back by the owner: N times the error stays in its residual, so the mean over the ranks of what
    counts as sent is what everyone receives.

    Costs at most ``2 k`` entries per rank, as long as k is no less than N (a region sends at least one).
    Source: Ok-Topk (Li and Hoefler 2022), with regions that need no balancing.
    """

    name = "sparse_split"

    def allows(self, codec: Codec) -> str | None:
        return None if codec.sparse else f"{codec} does not send entries of its choice; topk does"

    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        ops, ranks = ctx.ops, ctx.ranks
        regions = Regions(ctx.spec.numel, ranks)
        codec = _smallest(codec, regions.length)
        coder = chunks.Chunks(codec, ctx, [regions.length] * ranks)
        mine = coder.second[ctx.rank]

        split = regions.split(ops, memory.load())
        own = [coder.encode(NoMemory(ops, split[i]), chunk) for i, chunk in enumerate(coder.first)]
        del split
        mean, _ = yield from coder.mean(own, ctx.rank)
        means = yield from coder.share(coder.encode(NoMemory(ops, mean), mine))

        def entries(row: Array, chunk: Ctx) -> tuple[Array, Array]:
            return coding.entries(codec, coder.unpack(row, chunk), chunk)

        def sent() -> Iterator[tuple[Array, Array]]:
            for i in range(ranks):
                places, values = entries(means[i], coder.second[i])
                survived = ops.scatter_add(ops.zeros((regions.length,)), places, 0.0 * values + 1.0)
                if i == ctx.rank:
                    yield regions.entries(ops, i, places, (values - ops.take(mean, places)) * float(ranks))
                places, values = entries(own[i], coder.first[i])
                yield regions.entries(ops, i, places, values * ops.take(survived, places))

        def received() -> Iterator[tuple[Array, Array]]:
            for i in range(ranks):
                yield regions.entries(ops, i, *entries(means[i], coder.second[i]))

        return Received(sent=coding.Entries(ops, sent), mean=coding.Entries(ops, received))

    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        length = Regions(spec.numel, ranks).length
        row = chunks.width(_smallest(codec, length), [length])
        return [("all_to_all", ranks * row), ("gather", row)]


def _smallest(codec: Codec, length: int) -> Codec:
    """What sends the same entries of a region in the fewest bytes: of a few entries, values and indices as they
    are take no more than a range, a bitmap and whole bytes of codes."""
    head = codec.codecs[0] if isinstance(codec, Chain) else codec
    assert isinstance(head, TopK)
    return min((codec, head, replace(head, index="plain")), key=lambda each: chunks.width(each, [length]))
