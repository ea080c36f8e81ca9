"""What an exchange asks of a transport, and what it hands back to the flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hvd_gradcomp import coding
from hvd_gradcomp.codecs.base import Codec, Ctx, Received
from hvd_gradcomp.memory.base import Memory
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Send:
    """Combine the named vectors over all ranks; the transport resumes the generator with the
    results under the same names.

    how: ``sum`` and ``max`` combine elementwise (same shape comes back); ``gather`` gives an array
    ``[ranks, length]`` in rank order; ``all_to_all`` cuts the vector in ``ranks`` equal rows, row i for
    rank i, and gives ``[ranks, length / ranks]``: the rows that are for this rank, in rank order.
    """

    parts: Parts
    how: str
    largest: Parts = field(default_factory=dict)
    """Further vectors, combined by ``max`` in the same round."""
    group: tuple[int, ...] | None = None
    """The ranks that combine, this one among them, where it is not all of them; ``ranks`` and the order of the
    ranks are then those of the group. One of :meth:`Exchange.groups`."""
    finite: bool = False
    """Whether the gradient is known to be finite by now, so that nobody has to read it again to find out."""

    def __iter__(self) -> Iterator[tuple[str, Array, str]]:
        """``(name, vector, how)`` of all that is combined."""
        yield from ((name, array, self.how) for name, array in self.parts.items())
        yield from ((name, array, "max") for name, array in self.largest.items())


@dataclass(frozen=True)
class Commit:
    """No more sends. Resumed with the step's verdict: float32 ``(1,)``, 1 if the step counts."""


__all__ = ["BUCKET", "Commit", "Exchange", "Flow", "Received", "Rounds", "Send", "converse", "wire_bytes"]

BUCKET = 1 << 20
"""Bytes up to which the all-to-all rows of neighboring tensors share one message: Horovod fuses small tensors
of every other collective, and takes 70 ms for 60 of these on Gloo."""

Rounds = Generator[Send, Parts, Received]
Flow = Generator["Send | Commit", Any, Array]


class Exchange(ABC):
    """A strategy: a generator over a codec. The law: the mean over ranks of ``sent`` is ``mean``."""

    name: str

    @abstractmethod
    def allows(self, codec: Codec) -> str | None:
        """None if this exchange can carry the codec's payload, else the reason why not."""

    @abstractmethod
    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        """Encode what ``memory`` loads and exchange it."""

    @abstractmethod
    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        """``(how, bytes of one rank's contribution)`` of every Send, for counting without running."""

    def received(self, codec: Codec, spec: TensorSpec, ranks: int) -> float:
        """Bytes that one rank receives, and sends, for one reduction of a tensor."""
        return sum(wire_bytes(how, nbytes, ranks) for how, nbytes in self.sends(codec, spec, ranks))

    def groups(self, ranks: int) -> list[tuple[int, ...]]:
        """All groups of ranks that combine among themselves (``Send.group``), in the same order on every rank."""
        return []

    def state(self, codec: Codec, spec: TensorSpec, ranks: int, memory: bool) -> dict[str, tuple[int, str]]:
        """Name to (length, dtype) of the state arrays that the codec needs under this exchange, and of the
        exchange's own; the same on every rank. ``memory``: whether what is not sent is kept."""
        return codec.state(spec)


def converse(codec: Codec, memory: Memory, ctx: Ctx,
             send: Callable[[Parts], Generator[Send, Parts, list[Parts]]]) -> Rounds:
    """Drive the rounds of an interactive codec. ``send`` carries one round's payload and gives the
    payloads that came back, whose sum is the sum over ranks."""
    rounds = codec.rounds(memory.load, replace(ctx, products=coding.products(memory, ctx)))
    own = next(rounds)
    while True:
        received = yield from send(own)
        try:
            own = rounds.send((own, received))
        except StopIteration as end:
            return end.value


def wire_bytes(how: str, nbytes: int, ranks: int) -> float:
    """Bytes that one rank receives, and sends, for one collective of ``nbytes`` per rank.

    A ring: all-reduce moves ``2 (N-1)/N`` of the buffer, all-gather ``N-1`` contributions. All-to-all
    moves ``(N-1)/N``: all rows but the one that stays.
    """
    if how == "gather":
        return float((ranks - 1) * nbytes)
    return (1.0 if how == "all_to_all" else 2.0) * (ranks - 1) / ranks * nbytes
