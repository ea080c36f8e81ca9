"""``DistributedOptimizer``: Horovod's own, with compression, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_gradcomp.collectives.hvd_torch import hvd
from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.plan import LARGE, Exchanges
from hvd_gradcomp.policy import DEFAULT_MIN_SIZE
from hvd_gradcomp.torch.compression import Compression, LossScale


def DistributedOptimizer(
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        compression: Any = "none", *, exchange: Exchanges = "auto",
        min_size: int = DEFAULT_MIN_SIZE, loss_scale: LossScale = None, seed: int = 0, error_feedback: bool = True,
        verify: bool = False, large: int | None = LARGE, process_set: Any = hvd.global_process_set,
        op: Any = hvd.Average, **horovod: Any) -> Any:
    """``hvd.DistributedOptimizer`` with gradient compression.

    The same object as Horovod makes, with four of its faults mended: ``zero_grad`` takes
    ``set_to_none``; ``step(closure)`` reduces the gradients that the closure computes; and
    ``add_param_group`` after wrapping and copying are refused, since Horovod would never reduce the
    new group's gradients, nor the copy's.
    The Compression is the attribute ``compression``.

    Args:
        compression: whatever :class:`Compression` takes, a Compression, or a compressor of Horovod's own.
        exchange, min_size, loss_scale, seed, error_feedback, verify, large: see :class:`Compression`.
        horovod: what ``hvd.DistributedOptimizer`` takes (``backward_passes_per_step``, ``groups``,
            ``gradient_predivide_factor``, ``sparse_as_dense``, ...).

    Raises:
        UsageError: ``op=Adasum``, which needs whole gradients.
    """
    if op == hvd.Adasum:
        raise UsageError("op=Adasum combines parameter updates by their angles, which no payload can carry: use "
                         "op=Average or op=Sum with compression")
    if named_parameters is None:
        named = [(f"allreduce.noname.{i}.{j}", param) for i, group in enumerate(optimizer.param_groups)
                 for j, param in enumerate(group["params"])]
    else:
        named = list(named_parameters)
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        compression = Compression(compression, named, exchange=exchange, min_size=min_size, process_set=process_set,
                                  loss_scale=loss_scale, seed=seed, error_feedback=error_feedback, verify=verify,
                                  large=large)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression,
                                       process_set=process_set, op=op, **horovod)
    wrapped.compression = compression
    _mend(type(wrapped))
    return wrapped


def _mend(cls: Any) -> None:
    """Replace four methods of the class that Horovod made for this one optimizer.

    It is a fresh class each time, so nothing of Horovod itself changes. It cannot be subclassed:
    its methods call ``super(self.__class__, self)``.
    """
    # The inner optimizer's step fires the step hooks; Horovod's, unwrapped, must not fire them again.
    horovod_step = getattr(cls.step, "__wrapped__", cls.step)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if self._handles:
            raise AssertionError("zero_grad() was called after backward() and before step() or synchronize(): the "
                                 "gradients are still being reduced. With a GradScaler: synchronize(), "
                                 "scaler.unscale_(), and scaler.step() inside skip_synchronize()")
        super(cls, self).zero_grad(set_to_none)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        horovod_step(self)
        return loss

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        raise UsageError("add_param_group() after wrapping: Horovod would never reduce the new parameters' gradients. "
                         "Add the group to the optimizer before wrapping it")

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        raise UsageError("a wrapped optimizer cannot be copied or pickled: it is bound to gradients that are being "
                         "reduced. Copy its state_dict(), and that of its compression")

    setattr(step, "hooked", True)  # noqa: B010 - tells torch not to wrap it for hooks again
    cls.zero_grad, cls.step, cls.add_param_group, cls.__reduce_ex__ = zero_grad, step, add_param_group, __reduce_ex__
