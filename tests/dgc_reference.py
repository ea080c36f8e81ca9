"""Deep Gradient Compression of one tensor over N ranks as the paper states it, in float64, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Reference:
    """Momentum correction, factor masking, local clipping and weight decay; momentum SGD while dense.

    kept: number of entries sent in a step, None for a dense one, from the number of the step.
    """

    def __init__(self, weights: Any, ranks: int, kept: Callable[[int], int | None], *, lr: float = 1.0,
                 momentum: float = 0.9, nesterov: bool = False, weight_decay: float = 0.0,
                 clip_norm: float | None = None) -> None:
        self.weights: Floats = np.array(weights, np.float64)
        self.u = [np.zeros_like(self.weights) for _ in range(ranks)]
        self.v = [np.zeros_like(self.weights) for _ in range(ranks)]
        self.kept, self.lr, self.momentum, self.nesterov = kept, lr, momentum, nesterov
        self.weight_decay, self.clip_norm = weight_decay, clip_norm
        self.steps = 0

    def step(self, grads: Sequence[Any]) -> Floats:
        """One step with the ranks' gradients; the new weights, as a copy."""
        k, m = self.kept(self.steps), self.momentum
        self.steps += 1
        if k is None:
            g = np.mean(np.array(grads, np.float64), axis=0) + self.weight_decay * self.weights
            u = m * self.u[0] + g
            self.u = [u.copy() for _ in self.u]
            self.weights -= self.lr * (g + m * u if self.nesterov else u)
            return self.weights.copy()
        total = np.zeros_like(self.weights)
        for rank, grad in enumerate(grads):
            total += self._sent(rank, np.array(grad, np.float64), k)
        self.weights -= self.lr * total / len(grads)
        return self.weights.copy()

    def _sent(self, rank: int, g: Floats, k: int) -> Floats:
        if self.clip_norm is not None:
            g = g * min(1.0, self.clip_norm / np.sqrt(len(self.u)) / np.linalg.norm(g))
        g = g + self.weight_decay * self.weights
        u, v, m = self.u[rank], self.v[rank], self.momentum
        if self.nesterov:
            u[...] = m * (u + g)
            v += u + g
        else:
            u[...] = m * u + g
            v += u
        chosen = np.argsort(-np.abs(v), kind="stable")[:k]
        sent = np.zeros_like(v)
        sent[chosen] = v[chosen]
        u[chosen] = v[chosen] = 0.0
        return sent
