"""``none``: the gradient itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs.base import Claims, Codec, Ctx
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Dense(Codec):
    """No compression: 4 bytes per element, summed in flight.

    The Horovod adapters leave such tensors to Horovod's own all-reduce, which also fuses them.
    """

    name: ClassVar[str] = "none"
    family: ClassVar[str] = "cast"
    use: ClassVar[str] = "dense float32; what compression is measured against"
    claims: ClassVar[Claims] = Claims(lossless=True, summable=True)

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("values", spec.numel, "float32"),)

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        return {"values": x}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return ctx.ops.accumulate(acc, parts["values"])
