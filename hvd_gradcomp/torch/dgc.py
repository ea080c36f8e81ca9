"""``DGCOptimizer``: Deep Gradient Compression around ``torch.optim.SGD``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvd_gradcomp.codecs.base import Codec, is_number
from hvd_gradcomp.collectives.hvd_torch import hvd
from hvd_gradcomp.errors import SpecError, UsageError
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.memory.dgc import VELOCITY
from hvd_gradcomp.policy import DEFAULT_MIN_SIZE
from hvd_gradcomp.schedule import dgc
from hvd_gradcomp.torch.compression import Compression, LossScale
from hvd_gradcomp.torch.optimizer import DistributedOptimizer


def DGCOptimizer(
        optimizer: torch.optim.SGD, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        ratio: float = 0.001, warmup_steps: int = 400, warmup_schedule: Sequence[float] | None = None,
        begin_step: int = 0, clip_norm: float | None = None, value_codec: str | Codec | None = None,
        exchange: str = "auto", *, threshold: str = "exact", min_size: int = DEFAULT_MIN_SIZE,
        loss_scale: LossScale = None, seed: int = 0, verify: bool = False,
        process_set: Any = hvd.global_process_set, op: Any = hvd.Average, **horovod: Any) -> Any:
    """``hvd.DistributedOptimizer`` around an SGD whose large gradients go by Deep Gradient Compression.

    ::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        optimizer = gradcomp.DGCOptimizer(optimizer, model.named_parameters(), ratio=0.001, warmup_steps=4 * epoch)

    Momentum, Nesterov and weight decay are those of the SGD's parameter groups, each tensor's its own
    group's, looked up in every step. For a compressed tensor they are applied before the compression
    (``memory/dgc.py``) and its update is ``-lr`` times what comes back; smaller tensors are reduced by
    Horovod and updated by the SGD as ever. Before ``begin_step``, and with ``ratio=1``, all of it
    equals plain momentum SGD on the mean gradient. One rank alone does the same with a world of one.

    What is kept is in gradient units, without the learning rate, as SGD's own momentum is: what was
    not sent yet is applied with the learning rate of the step in which it is sent.

    Velocity and residual are per rank: ``optimizer.compression.state_dict()``, beside the optimizer's.

    Args:
        ratio: share of each compressed tensor's entries that is sent in a step.
        warmup_steps: steps after ``begin_step`` in which the ratio falls to ``ratio``; the paper takes
            the first 4 epochs. 0 for none.
        warmup_schedule: the ratios of the warm-up's equally long stages; 0.25, 0.0625, 0.015625,
            0.004 by default, as far as they are above ``ratio``.
        begin_step: number of dense steps before.
        clip_norm: largest L2 norm of each compressed tensor's mean gradient, used as
            ``clip_norm * ranks ** -0.5`` on each rank's own; None for no clipping. A compressed stage only.
        value_codec: encodes the values that are sent, such as ``"uniform(bits=8)"``.
        exchange, min_size, loss_scale, seed, verify, process_set: see :class:`Compression`.
        threshold: how the largest entries are found, see ``topk``: ``"exact"``, ``"sampled"`` (as in the
            paper), ``"statistical"``.
        op: ``hvd.Average``.
        horovod: what ``hvd.DistributedOptimizer`` takes (``backward_passes_per_step``, ...).

    Returns:
        A subclass of the given optimizer's class, with the Compression as attribute ``compression``.

    Raises:
        UsageError: an optimizer that is no SGD, one with dampening or maximize, or another ``op``.
        SpecError: a setting that cannot be.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        raise UsageError(
            f"DGC corrects the momentum of torch.optim.SGD, not of {type(optimizer).__name__}: use hvd_gradcomp.torch."
            f"DistributedOptimizer(optimizer, named_parameters, compression=\"topk(ratio={ratio})\"), whose error "
            "feedback works with any optimizer")
    if op != hvd.Average:
        raise UsageError("DGC needs op=Average: another one would scale weight decay and momentum too")
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise SpecError(f"clip_norm must be above 0, or None, not {clip_norm!r}")
    spec = dgc(ratio, warmup_steps=warmup_steps, warmup_schedule=warmup_schedule, begin_step=begin_step,
               value_codec=value_codec, threshold=threshold)
    named = None if named_parameters is None else list(named_parameters)
    groups = _Groups(optimizer, clip_norm)
    inner = type(type(optimizer).__name__, (_SentUpdates, type(optimizer)), {})(optimizer.param_groups)
    compression = Compression(spec, groups.named() if named is None else named, exchange=exchange, min_size=min_size,
                              process_set=process_set, loss_scale=loss_scale, seed=seed, verify=verify,
                              sgd=groups.momentum)
    wrapped = DistributedOptimizer(inner, named, compression, process_set=process_set, op=op, **horovod)
    groups.optimizer = wrapped
    wrapped.sent = {id(param) for _, param in compression.parameters()}
    # An entry for every parameter, so that hvd.broadcast_optimizer_state makes no step to create them.
    for param in groups.parameters():
        wrapped.state[param] = dict(optimizer.state.get(param, {}))
    for slot, param in compression.parameters():
        buffer = optimizer.state.get(param, {}).get("momentum_buffer")
        if buffer is not None:
            slot.state[VELOCITY].copy_(buffer.reshape(-1))
            wrapped.state[param] = {}
    _add_alone(type(wrapped))
    return wrapped


class _Groups:
    """What the parameter groups say about each parameter at the moment."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
        self.optimizer, self.clip_norm = optimizer, clip_norm
        self._group = {id(param): i for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
        for group in optimizer.param_groups:
            _check(group)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The names that Horovod gives parameters without names."""
        return [(f"allreduce.noname.{i}.{j}", param) for i, group in enumerate(self.optimizer.param_groups)
                for j, param in enumerate(group["params"])]

    def momentum(self, param: torch.nn.Parameter) -> Momentum:
        """Raises UsageError if the group was given dampening or maximize in the meantime."""
        # load_state_dict makes new groups: only their order stays
        group = self.optimizer.param_groups[self._group[id(param)]]
        _check(group)
        decay = float(group["weight_decay"])
        weights = param.detach().reshape(-1).contiguous().float() if decay else None
        return Momentum(float(group["momentum"]), bool(group["nesterov"]), decay, weights, self.clip_norm)


def _check(group: dict[str, Any]) -> None:
    for name in ("dampening", "maximize"):
        if group[name]:
            raise UsageError(f"DGC has no rule for {name}={group[name]!r}, which changes what momentum adds up: leave "
                             "it at its default")


class _SentUpdates:
    """Comes before the SGD's class: a compressed parameter's gradient holds its momentum and weight
    decay already, so its update is the learning rate times that."""

    sent: frozenset[int] | set[int] = frozenset()
    """ids of the compressed parameters."""
    sparse_as_dense = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        done: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for group in self.param_groups:  # type: ignore[attr-defined]
            for param in group["params"]:
                grad = param.grad
                if id(param) in self.sent and grad is not None and (self.sparse_as_dense or not grad.is_sparse):
                    param.sub_((grad.to_dense() if grad.is_sparse else grad) * group["lr"])
                    done.append((param, grad))
                    param.grad = None  # SGD skips it
        try:
            # The step hooks fire around this method, so not around SGD's once more.
            step = super().step  # type: ignore[misc]
            getattr(step, "__wrapped__", step.__func__)(self)
        finally:
            for param, grad in done:
                param.grad = grad
        return loss


def _add_alone(cls: Any) -> None:
    """Where Horovod reduces nothing because there is one rank, ``synchronize`` runs DGC on this rank's gradients."""
    horovod_synchronize = cls.synchronize

    def synchronize(self: Any) -> None:
        if self._synchronized and not self._handles and not self.compression.new_gradients:
            return  # this step's gradients hold their momentum already
        horovod_synchronize(self)
        if not self._requires_update:
            self.compression.step_alone(self.sparse_as_dense)
            self._synchronized = True

    cls.synchronize = synchronize
