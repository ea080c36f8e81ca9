"""Error feedback: ``x = g + e``; ``x`` is compressed; ``e = x - sent`` is kept.

The residual ``e`` is float32 and in unscaled gradient units: under a loss scale S the gradient is
``S g``, so ``x = S g + S e`` and ``e = (x - sent) / S``. A changed loss scale then loses nothing
(S is a power of two in every loss scaler, so the scaling itself rounds nothing).

Source: Seide et al. (2014); Karimireddy et al. (2019), Algorithm 2 without the learning rate.
"""

from __future__ import annotations

from hvd_gradcomp.ops.base import Array, Ops

STATE = "residual"


def load(grad: Array, residual: Array | None, loss_scale: Array | float | None) -> Array:
    """What is to be compressed: float32 ``[numel]``. Reads only."""
    if residual is None:
        return grad
    return grad + (residual if loss_scale is None else residual * loss_scale)


def settle(ops: Ops, x: Array, sent: Array, residual: Array, loss_scale: Array | float | None, ok: Array) -> None:
    """Keep ``x - sent`` in ``residual`` if the step counts."""
    kept = x - sent
    ops.assign(residual, kept if loss_scale is None else kept / loss_scale, ok)
