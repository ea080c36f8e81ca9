"""What a memory is: one step's gradient together with what earlier steps kept of theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hvd_gradcomp.ops.base import Array, Ops


@dataclass(frozen=True)
class Memory(ABC):
    """A gradient, float32 ``[numel]``, and the state arrays that remember for it."""

    ops: Ops
    grad: Array

    @abstractmethod
    def load(self) -> Array:
        """What is to be compressed: float32 ``[numel]``, a new array or ``grad`` itself. Reads only."""

    @abstractmethod
    def settle(self, sent: Array, ok: Array) -> None:
        """Keep what is not in ``sent``, float32 ``[numel]``, if the step counts (``ok``: ``(1,)``, 0 or 1)."""

    def result(self, mean: Array, ok: Array) -> Array:
        """What the optimizer is given in place of ``mean``, float32 ``[numel]``, which is used up."""
        return mean

    @abstractmethod
    def part(self, start: int, stop: int) -> Memory:
        """A stretch of the tensor, to load from; what is kept is settled as a whole."""

    @abstractmethod
    def second(self, mean: Array, residual: Array | None) -> Memory:
        """The memory of the rank that encodes a mean, float32 ``[n]``, of what all ranks sent: error feedback
        with ``residual``, float32 ``[n]``; none if it is None."""

    @property
    def keeps(self) -> bool:
        """Whether :meth:`settle` does anything, so that ``sent`` is worth decoding."""
        return True


@dataclass(frozen=True)
class NoMemory(Memory):
    """What is not sent is lost: for lossless codecs, and without error feedback."""

    def load(self) -> Array:
        return self.grad

    def settle(self, sent: Array, ok: Array) -> None:
        pass

    def part(self, start: int, stop: int) -> NoMemory:
        return NoMemory(self.ops, self.grad[start:stop])

    def second(self, mean: Array, residual: Array | None) -> NoMemory:
        return NoMemory(self.ops, mean)

    @property
    def keeps(self) -> bool:
        return False
