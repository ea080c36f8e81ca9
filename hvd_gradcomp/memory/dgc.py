"""Deep Gradient Compression: each rank applies momentum to its own gradient, before compression.

With momentum ``m``, local gradient ``g`` (clipped, then weight decay added), velocity ``u`` and
accumulated velocity ``v``::

    u = m u + g            Nesterov:  u = m (u + g)
    v = v + u                         v = v + u + g
    v is compressed; v = v - sent; u = 0 where something was sent (factor masking)

so a coordinate that waits gathers momentum as if it had been applied in every step, and one that was
sent does not push in a direction that is out of date by then. A dense stage has nothing to correct:
there the momentum follows the mean, ``u = m u + mean``, as in plain SGD, and is the ``u`` that a
later compressed stage starts from.

``u`` and ``v`` are float32 and in unscaled gradient units, without the learning rate, as the momentum
buffer of ``torch.optim.SGD``.

Source: Lin et al. (2018), Deep Gradient Compression, Algorithm 1 and sections 3.1 to 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.memory.base import Memory, NoMemory
from hvd_gradcomp.memory.error_feedback import ErrorFeedback
from hvd_gradcomp.ops import exact
from hvd_gradcomp.ops.base import Array, Ops

VELOCITY = "momentum"


@dataclass(frozen=True)
class Momentum:
    """What an SGD optimizer does with a gradient, for this tensor in this step.

    momentum, weight_decay: numbers or float32 ``(1,)``.
    weights: float32 ``[numel]``, what ``weight_decay`` is multiplied by; None for no decay.
    clip_norm: largest L2 norm of this tensor's mean gradient; a rank's own is clipped at
        ``clip_norm * ranks ** -0.5``, since independent gradients add up to that.
    """

    momentum: Array | float
    nesterov: bool = False
    weight_decay: Array | float = 0.0
    weights: Array | None = None
    clip_norm: float | None = None

    def part(self, start: int, stop: int) -> Momentum:
        """The same for a stretch of the tensor."""
        return self if self.weights is None else replace(self, weights=self.weights[start:stop])


@dataclass(frozen=True)
class _SgdMemory(Memory):
    """
    velocity: the state array ``u``.
    loss_scale: what the loss, thus the gradient, was multiplied by; None for 1.
    """

    sgd: Momentum
    velocity: Array
    loss_scale: Array | float | None

    def second(self, mean: Array, residual: Array | None) -> Memory:
        if residual is None:
            return NoMemory(self.ops, mean)
        return ErrorFeedback(self.ops, mean, residual, self.loss_scale)

    def _decay(self) -> Array | None:
        """A new array: what weight decay adds to the gradient."""
        if self.sgd.weights is None:
            return None
        return self.sgd.weights * self._number(self.sgd.weight_decay)

    def _number(self, value: Array | float) -> Array:
        return self.ops.scalar(value) if isinstance(value, (int, float)) else value

    def _unscaled(self, x: Array) -> Array:
        return x if self.loss_scale is None else x / self.loss_scale

    def _scaled(self, x: Array) -> Array:
        return x if self.loss_scale is None else x * self.loss_scale


@dataclass(frozen=True)
class MomentumCorrection(_SgdMemory):
    """
    residual: the state array ``v``.
    clip: float32 ``(1,)``, what the gradient is multiplied by so that it does not exceed its norm.
    """

    residual: Array
    clip: Array | None

    def load(self) -> Array:
        return self._scaled(self._accumulated(self._velocity()))

    def settle(self, sent: Array, ok: Array) -> None:
        ops = self.ops
        velocity = self._velocity()
        ops.assign(self.residual, self._accumulated(velocity) - self._unscaled(sent), ok)
        ops.assign(self.velocity, ops.where(ops.abs(sent) > 0.0, 0.0, velocity), ok)

    def part(self, start: int, stop: int) -> MomentumCorrection:
        return MomentumCorrection(self.ops, self.grad[start:stop], self.sgd.part(start, stop),
                                  self.velocity[start:stop], self.loss_scale, self.residual[start:stop], self.clip)

    def _gradient(self) -> Array:
        """``g``: the rank's own gradient, clipped, with its weight decay."""
        g = self._unscaled(self.grad)
        if self.clip is not None:
            g = g * self.clip
        decay = self._decay()
        return g if decay is None else self.ops.accumulate(decay, g)

    def _velocity(self) -> Array:
        """The new ``u``, as a new array."""
        m = self._number(self.sgd.momentum)
        if self.sgd.nesterov:
            return (self.velocity + self._gradient()) * m
        return self.ops.accumulate(self.velocity * m, self._gradient())

    def _accumulated(self, velocity: Array) -> Array:
        """The new ``v``, as a new array."""
        v = velocity + self.residual
        return self.ops.accumulate(v, self._gradient()) if self.sgd.nesterov else v


@dataclass(frozen=True)
class MomentumAfterMean(_SgdMemory):
    """A dense stage: plain momentum SGD."""

    def load(self) -> Array:
        decay = self._decay()
        return self.grad if decay is None else self.ops.accumulate(self._scaled(decay), self.grad)

    def settle(self, sent: Array, ok: Array) -> None:
        pass

    def part(self, start: int, stop: int) -> MomentumAfterMean:
        return MomentumAfterMean(self.ops, self.grad[start:stop], self.sgd.part(start, stop),
                                 self.velocity[start:stop], self.loss_scale)

    @property
    def keeps(self) -> bool:
        return False

    def result(self, mean: Array, ok: Array) -> Array:
        ops, m = self.ops, self._number(self.sgd.momentum)
        g = self._unscaled(mean)
        velocity = ops.accumulate(self.velocity * m, g)
        out = ops.accumulate(velocity * m, g) if self.sgd.nesterov else velocity
        ops.assign(self.velocity, velocity, ok)
        return self._scaled(out)


def clip_factor(ops: Ops, grad: Array, clip_norm: float, ranks: int, loss_scale: Array | float | None) -> Array:
    """``min(1, clip_norm ranks**-0.5 / |grad|)`` of an unscaled gradient, float32 ``(1,)``."""
    largest = ops.max_rows(ops.reshape(ops.abs(grad), (1, int(grad.shape[0]))))
    down, up = blocks.powers(ops, largest)
    scaled = grad * down
    # The largest square is about 1, or all are 0. Not ops.sqrt: torch's on a device is off by an ulp.
    norm = exact.root(ops, ops.maximum(blocks.total(ops, scaled * scaled), 2.0**-100)) * up
    if loss_scale is not None:
        norm = norm / loss_scale
    return ops.minimum(ops.scalar(clip_norm / math.sqrt(ranks)) / blocks.divisor(ops, norm), 1.0)
