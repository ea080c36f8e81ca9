"""What an exchange asks of a transport, and what it hands back to the flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Send:
    """Combine the named vectors over all ranks; the transport resumes the generator with the
    results under the same names.

    how: ``sum`` and ``max`` combine elementwise (same shape comes back); ``gather`` gives an array
    ``[ranks, length]`` in rank order.
    """

    parts: Parts
    how: str


@dataclass(frozen=True)
class Commit:
    """No more sends. Resumed with the step's verdict: float32 ``(1,)``, 1 if the step counts."""


@dataclass(frozen=True)
class Received:
    """What came back, not yet decoded: the residual is settled first, from the gradient's own
    storage, before the mean may be written there.

    sent: ``sent(acc)`` adds what this rank's payload is counted as.
    mean: ``mean(acc)`` adds the mean of what all ranks' payloads are counted as; ``acc`` is zeros.
    state: new values of the codec's state arrays.
    """

    sent: Callable[[Array], Array]
    mean: Callable[[Array], Array]
    state: Callable[[], dict[str, Array]] = dict


Rounds = Generator[Send, Parts, Received]
Flow = Generator["Send | Commit", Any, Array]


class Exchange(ABC):
    """A strategy: a generator over a codec. The law: the mean over ranks of ``sent`` is ``mean``."""

    name: str

    @abstractmethod
    def allows(self, codec: Codec) -> str | None:
        """None if this exchange can carry the codec's payload, else the reason why not."""

    @abstractmethod
    def rounds(self, codec: Codec, x: Array, ctx: Ctx) -> Rounds:
        """Encode ``x`` and exchange it."""

    @abstractmethod
    def sends(self, codec: Codec, spec: TensorSpec) -> list[tuple[str, int]]:
        """``(how, bytes of one rank's contribution)`` of every Send, for counting without running."""


def wire_bytes(how: str, nbytes: int, ranks: int) -> float:
    """Bytes that one rank receives, and sends, for one collective of ``nbytes`` per rank.

    A ring: all-reduce moves ``2 (N-1)/N`` of the buffer, all-gather ``N-1`` contributions.
    """
    if how == "gather":
        return float((ranks - 1) * nbytes)
    return 2.0 * (ranks - 1) / ranks * nbytes
