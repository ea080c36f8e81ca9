"""Gradients in the host's memory whose codecs have kernels: their flow runs on numpy views of the same memory.

For a small tensor the number of calls is what costs, and calls on numpy arrays are cheaper than those on tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import is_
from typing import Any

import numpy as np
import torch

from hvd_gradcomp import coding
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.exchange.base import Commit, Flow, Send
from hvd_gradcomp.flow import reduce_gradient
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.plan import Plan, Slot

_numpy = NumpyOps()


_EXCHANGES = ("gather", "sum", "two_stage")
"""Those that leave nearly all of the work to the codec's kernel; torch's own operations may take several threads."""


def fits(slot: Slot, stage: int) -> bool:
    """Whether :func:`flow` is the way for a tensor on the host."""
    known: bool | None = slot.buffers.get((fits, stage))
    if known is None:
        codec, exchange = slot.stages[stage].codec, slot.stages[stage].exchange
        sent = codec.summed(2) if exchange.name == "sum" else codec
        known = exchange.name in _EXCHANGES and sent is not None and coding.has_kernel(sent, slot.spec)
        slot.buffers[fits, stage] = known
    return known


def quiet() -> np.errstate:
    """For what runs flows: torch's operations warn of no overflow and no NaN either."""
    return np.errstate(all="ignore")


def flow(x: torch.Tensor, slot: Slot, plan: Plan, ranks: int, rank: int, *, stage: int, loss_scale: Any,
         sgd: Momentum | None, output: Callable[[bool], torch.Tensor]) -> Flow:
    """:func:`reduce_gradient` of tensors."""
    views = slot.buffers.get(_Views)
    if views is None or not views.fits(slot, ranks, rank):
        views = slot.buffers[_Views] = _Views(slot, plan, ranks, rank)
    if isinstance(loss_scale, torch.Tensor):
        loss_scale = loss_scale.detach().cpu().numpy().astype(np.float32).reshape(1)
    if sgd is not None and sgd.weights is not None:
        sgd = replace(sgd, weights=sgd.weights.numpy())
    return _tensors(reduce_gradient(x.numpy(), views.slot, views.ctx, stage=stage, loss_scale=loss_scale, sgd=sgd,
                                    output=lambda clear: output(clear).numpy()))


class _Views:
    """A slot of arrays in place of one of tensors, and its ctx; the same from step to step."""

    def __init__(self, slot: Slot, plan: Plan, ranks: int, rank: int) -> None:
        self._tensors = list(slot.state.values())
        arrays = {name: tensor.numpy() for name, tensor in slot.state.items()}
        self.slot = Slot(slot.spec, slot.schedule, slot.stages, state=arrays, buffers=slot.buffers)
        self.ctx = Ctx(_numpy, slot.spec, ranks, rank, plan.seed, state=arrays, error_feedback=plan.error_feedback,
                       buffers=slot.buffers)

    def fits(self, slot: Slot, ranks: int, rank: int) -> bool:
        """Whether they are still views of what the slot holds."""
        return (len(self._tensors) == len(slot.state) and all(map(is_, self._tensors, slot.state.values()))
                and (self.ctx.ranks, self.ctx.rank) == (ranks, rank))


def _tensors(flow: Flow) -> Flow:
    """A flow of arrays as one of tensors."""
    answer: Any = None
    while True:
        try:
            request = flow.send(answer)
        except StopIteration as end:
            return torch.from_numpy(end.value)
        if isinstance(request, Commit):
            answer = (yield request).numpy()
        else:
            parts = {name: torch.from_numpy(array) for name, array in request.parts.items()}
            largest = {name: torch.from_numpy(array) for name, array in request.largest.items()}
            received = yield Send(parts, request.how, largest, request.group, request.finite)
            answer = {name: tensor.numpy() for name, tensor in received.items()}
