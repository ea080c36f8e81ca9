"""What was not sent, and how it comes back."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_gradcomp.memory import dgc, error_feedback
from hvd_gradcomp.memory.base import Memory, NoMemory
from hvd_gradcomp.memory.dgc import Momentum, MomentumAfterMean, MomentumCorrection
from hvd_gradcomp.memory.error_feedback import ErrorFeedback
from hvd_gradcomp.ops.base import Array, Ops

__all__ = ["Memory", "Momentum", "remember"]


def remember(ops: Ops, grad: Array, state: Mapping[str, Array], loss_scale: Array | float | None = None, *,
             sgd: Momentum | None = None, dense: bool = False, ranks: int = 1) -> Memory:
    """The memory that a tensor's state arrays stand for.

    Args:
        sgd: the optimizer's momentum, if this memory is to apply it (Deep Gradient Compression).
        dense: whether everything is sent in this stage.
    """
    if dgc.VELOCITY in state:
        assert sgd is not None, "a velocity without the optimizer's momentum"
        if dense:
            return MomentumAfterMean(ops, grad, sgd, state[dgc.VELOCITY], loss_scale)
        clip = None if sgd.clip_norm is None else dgc.clip_factor(ops, grad, sgd.clip_norm, ranks, loss_scale)
        return MomentumCorrection(ops, grad, sgd, state[dgc.VELOCITY], loss_scale, state[error_feedback.STATE], clip)
    if error_feedback.STATE in state:
        return ErrorFeedback(ops, grad, state[error_feedback.STATE], loss_scale)
    return NoMemory(ops, grad)
