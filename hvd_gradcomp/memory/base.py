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

    @property
    def keeps(self) -> bool:
        return False
