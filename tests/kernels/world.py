"""One tensor through the kernels and through the codec's own operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from hvd_gradcomp import coding, native, payload
from hvd_gradcomp.codecs.base import Codec, Ctx, Received
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.memory.base import Memory, NoMemory
from hvd_gradcomp.memory.dgc import MomentumCorrection
from hvd_gradcomp.memory.error_feedback import ErrorFeedback
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.spec import TensorSpec

OPS = NumpyOps()
OK = np.ones(1, np.float32)

SPECS = (
    *(f"uniform(bits={bits})" for bits in range(1, 17)),
    "uniform(bits=8, block=None)", "uniform(bits=5, block=8)", "uniform(bits=7, block=8192)",
    "uniform(bits=4, symmetric=True)", "uniform(bits=8, symmetric=True, stochastic=True)",
    "uniform(bits=3, stochastic=True)", "uniform(bits=16, stochastic=True)",
    *(f"log(bits={bits})" for bits in (2, 4, 5, 8, 9, 12, 16)), "log(bits=8, delta=1)", "log(bits=6, delta=1e-06)",
    "sign", "sign(block=None)", "sign(block=64)", "ternary", "ternary(block=64)", "ternary(block=1000)",
    "qsgd(levels=127)", "qsgd(levels=1)", "qsgd(levels=32767)", "qsgd(levels=4, block=128)",
    "natural", "bf16", "fp16", "topk(ratio=0.01)", "topk(ratio=1)", "topk(ratio=0.3, index='plain')",
    "randomk(ratio=0.1)", "randomk(ratio=0.1, shared=False)", "topk(ratio=0.05) + uniform(bits=8)",
    "topk(ratio=0.2) + topk(ratio=0.5) + bf16")
"""What has kernels, at every width of codes."""


@contextmanager
def pure() -> Iterator[None]:
    """Without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "find", lambda codec, spec: None)
        patch.setattr(native, "available", lambda: False)
        yield


@dataclass
class Tensor:
    """A gradient and what was kept, on rank 1 of 3 in step 5."""

    codec: Codec
    grad: np.ndarray[Any, Any]
    residual: np.ndarray[Any, Any] | None
    loss_scale: float | None = None
    state: dict[str, Any] = field(default_factory=lambda: {"step": np.array([5], np.int32)})
    velocity: np.ndarray[Any, Any] | None = None
    """Of Deep Gradient Compression, with ``sgd`` and ``clip``."""
    sgd: Momentum | None = None
    clip: np.ndarray[Any, Any] | None = None

    @property
    def memory(self) -> Memory:
        if self.residual is None:
            return NoMemory(OPS, self.grad)
        if self.sgd is not None:
            return MomentumCorrection(OPS, self.grad, self.sgd, self.velocity, self.loss_scale, self.residual,
                                      self.clip)
        return ErrorFeedback(OPS, self.grad, self.residual, self.loss_scale)

    @property
    def ctx(self) -> Ctx:
        ctx = Ctx(OPS, TensorSpec("w", (self.grad.size,)), 3, 1, 11, self.state,
                  error_feedback=self.residual is not None)
        return replace(ctx, bound=coding.largest(self.memory, ctx)) if self.codec.uses_bound else ctx

    def encode(self) -> np.ndarray[Any, Any]:
        """The payload's bytes."""
        ctx = self.ctx
        return payload.pack(OPS, coding.encode(self.codec, self.memory, ctx), self.codec.layout(ctx.spec)).copy()

    def decode(self, blob: np.ndarray[Any, Any], acc: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return coding.decode(self.codec, self._parts(blob), acc.copy(), self.ctx)

    def mean(self, blobs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        ctx = self.ctx
        payloads = [(self._parts(blob), replace(ctx, rank=rank)) for rank, blob in enumerate(blobs)]
        anything = np.nan if coding.covers(self.codec, ctx) else 0.0
        return coding.mean(self.codec, payloads, np.full_like(self.grad, anything))

    def settle(self, blob: np.ndarray[Any, Any], ok: np.ndarray[Any, Any] = OK) -> np.ndarray[Any, Any]:
        """The new residual, with the new velocity behind it if there is one."""
        assert self.residual is not None
        ctx = self.ctx
        kept = [self.residual.copy()] if self.velocity is None else [self.residual.copy(), self.velocity.copy()]
        after = replace(self, residual=kept[0], velocity=kept[-1])
        received = Received(sent=coding.Sent(self.codec, self._parts(blob), ctx), mean=lambda acc: acc)
        coding.settle(received, after.memory, ctx, ok)
        return np.concatenate(kept)

    def _parts(self, blob: np.ndarray[Any, Any]) -> payload.Packed:
        return payload.unpack(OPS, blob, self.codec.layout(self.ctx.spec))


def bits(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What must be equal: all bits, but any NaN for a NaN."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32) if x.dtype == np.float32 else x
