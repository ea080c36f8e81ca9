"""Parameters whose gradients a test chooses, reduced by a stock Horovod optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.exchange.two_stage import OWNER, bounds

CODECS = ["none", "fp16", "bf16", "uniform(bits=8)", "uniform(bits=3, block=64, stochastic=True)", "sign",
          "topk(ratio=0.05)", "topk(ratio=0.1) + uniform(bits=8)"]
LOSSY = [spec for spec in CODECS if spec != "none"]


def randn(*shape: int, seed: int, rank: int | None = None) -> torch.Tensor:
    """Normal numbers that any rank can make for any rank."""
    rank = hvd.rank() if rank is None else rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


def mean_over_ranks(make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """The mean gradient, in float64, computed without any collective."""
    return sum(make(rank).double() for rank in range(hvd.size())) / hvd.size()  # type: ignore[return-value]


def assert_equal_on_ranks(tensor: torch.Tensor) -> None:
    """Bitwise equality over all ranks."""
    everyone = hvd.allgather_object(tensor.detach().contiguous().cpu())
    for rank, other in enumerate(everyone):
        assert torch.equal(everyone[0], other), f"rank {rank} differs from rank 0"


class World:
    """Zero parameters of the given shapes under SGD with learning rate 1."""

    def __init__(self, spec: Any, shapes: Mapping[str, Sequence[int]] | Mapping[str, torch.Tensor], *,
                 min_size: int = 0, horovod: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.params = {name: torch.nn.Parameter(shape.clone() if isinstance(shape, torch.Tensor)
                                                else torch.zeros(tuple(shape))) for name, shape in shapes.items()}
        self.compression = gradcomp.Compression(spec, self.params.items(), min_size=min_size, **kwargs)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.params.values(), lr=1.0), named_parameters=list(self.params.items()),
            compression=self.compression, **(horovod or {}))

    def backward(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Make each named parameter's gradient exactly what is given."""
        sum((self.params[name] * grad).sum() for name, grad in grads.items()).backward()  # type: ignore[union-attr]

    def reduce(self, grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One step's reduced gradients, without moving the parameters."""
        self.optimizer.zero_grad()
        for param in self.params.values():
            param.grad = None
        self.backward(grads)
        self.optimizer.synchronize()
        return {name: param.grad.clone() for name, param in self.params.items() if param.grad is not None}

    def residual(self, name: str) -> torch.Tensor:
        """Mean over ranks of the residual, in float64, and what the owners of chunks keep of their means."""
        slot = self.compression.plan.slots[name]
        kept = torch.zeros(slot.spec.numel, dtype=torch.float64)
        if "residual" in slot.state:
            kept += slot.state["residual"]
        if OWNER in slot.state:
            start, stop = bounds(slot.spec.numel, hvd.size())[hvd.rank()]
            kept[start:stop] += hvd.size() * slot.state[OWNER][: stop - start]
        return sum(hvd.allgather_object(kept)).view(slot.spec.shape) / hvd.size()  # type: ignore[union-attr]

    def states(self) -> dict[str, torch.Tensor]:
        """A copy of every state array."""
        return {f"{name}/{key}": array.clone() for name, slot in self.compression.plan.slots.items()
                for key, array in slot.state.items()}
