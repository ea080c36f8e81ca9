"""Error feedback: ``x = g + e``; ``x`` is compressed; ``e = x - sent`` is kept.

The residual ``e`` is float32 and in unscaled gradient units: under a loss scale S the gradient is
``S g``, so ``x = S g + S e`` and ``e = (x - sent) / S``. A changed loss scale then loses nothing
(S is a power of two in every loss scaler, so the scaling itself rounds nothing).

Source: Seide et al. (2014); Karimireddy et al. (2019), Algorithm 2 without the learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.memory.base import Memory, NoMemory
from hvd_gradcomp.ops.base import Array

STATE = "residual"


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """
    residual: the state array ``e``.
    loss_scale: what the loss, thus the gradient, was multiplied by; None for 1.
    """

    residual: Array
    loss_scale: Array | float | None = None

    def load(self) -> Array:
        return self.grad + (self.residual if self.loss_scale is None else self.residual * self.loss_scale)

    def settle(self, sent: Array, ok: Array) -> None:
        self.ops.assign(self.residual, self.kept(sent), ok)

    def kept(self, sent: Array) -> Array:
        """The new residual."""
        left = self.load() - sent
        return left if self.loss_scale is None else left / self.loss_scale

    def part(self, start: int, stop: int) -> ErrorFeedback:
        return ErrorFeedback(self.ops, self.grad[start:stop], self.residual[start:stop], self.loss_scale)

    def second(self, mean: Array, residual: Array | None) -> Memory:
        if residual is None:
            return NoMemory(self.ops, mean)
        return ErrorFeedback(self.ops, mean, residual, self.loss_scale)
