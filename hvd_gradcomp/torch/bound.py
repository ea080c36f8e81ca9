"""A parameter with its slot and what is open for it in a step, and what has to be known about its gradient's memory."""

from __future__ import annotations

import torch

from hvd_gradcomp.collectives.hvd_torch import Bucket, OpenExchange
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.plan import Slot


class Bound:
    """A parameter, its slot, and what is open for it in this step."""

    def __init__(self, slot: Slot, param: torch.nn.Parameter) -> None:
        self.slot, self.param = slot, param
        self.ops = TorchOps(param.device)
        self.steps = [0] * max(len(slot.stages), 1)  # by stage
        self.stage = 0
        self.grad: torch.Tensor | None = None  # given to compress in this step
        self.version = 0  # of grad, when it was compressed
        self.probe: bytes | torch.Tensor | None = None  # some of its elements then
        self.storage = 0  # of grad
        self.exchange: OpenExchange | None = None
        self.bucket: tuple[Bucket, int] | None = None  # and its place there
        self.mean: torch.Tensor | None = None

    def is_changed(self) -> bool:
        """Whether somebody wrote to the gradient since it was compressed."""
        assert self.grad is not None
        if self.grad._version != self.version:
            return True
        if self.probe is None:
            return False
        now = sample(self.grad)
        return now != self.probe if isinstance(now, bytes) or isinstance(self.probe, bytes) else not torch.equal(
            now, self.probe)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """float32 ``[numel]`` by logical index, the tensor's own storage where that is possible."""
    if tensor.dtype == torch.float32 and tensor.is_contiguous():
        return tensor.detach().view(-1)
    return tensor.detach().reshape(-1).contiguous().float()


def is_sparse(param: torch.Tensor) -> bool:
    return param.grad is not None and param.grad.is_sparse


def sample(tensor: torch.Tensor) -> bytes | torch.Tensor:
    """The bytes of some elements: about 64 of them, or up to 8 along each dimension."""
    if tensor.is_cpu and tensor.dtype == torch.float32 and tensor.is_contiguous():
        vector = tensor.detach().numpy().reshape(-1)
        return vector[:: vector.size // 64 | 1].tobytes()  # an odd stride visits all columns
    some = tensor.detach()[tuple(slice(None, None, max(1, -(-size // 8))) for size in tensor.shape)]
    return some.reshape(-1).clone().view(torch.uint8)


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as in an expanded gradient, so that it cannot be written to."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
