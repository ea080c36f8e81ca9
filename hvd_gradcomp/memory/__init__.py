"""What was not sent, and how it comes back."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_gradcomp.memory import error_feedback
from hvd_gradcomp.memory.base import Memory, NoMemory
from hvd_gradcomp.memory.error_feedback import ErrorFeedback
from hvd_gradcomp.ops.base import Array, Ops


def remember(ops: Ops, grad: Array, state: Mapping[str, Array], loss_scale: Array | float | None = None) -> Memory:
    """The memory that a tensor's state arrays stand for."""
    if error_feedback.STATE in state:
        return ErrorFeedback(ops, grad, state[error_feedback.STATE], loss_scale)
    return NoMemory(ops, grad)
