"""``svd``: the best approximation of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import matrix
from hvd_gradcomp.codecs.base import Codec, Ctx, is_int
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class SVD(Codec):
    """Truncated singular value decomposition of the gradient as a matrix ``[m, n]``
    (:func:`matrix.view`): ``U S V^T`` of the ``rank`` largest singular values travels.

    No matrix of this rank is nearer in the L2 norm (Eckart and Young 1936), but every rank sends its
    own, and the decomposition takes ``m n min(m, n)`` operations: seconds beyond 1000 x 1000. On
    CUDA it makes the host wait for the device. ``powersgd`` has neither fault.

    Non-finite elements count as 0; a matrix that the library fails to decompose (none is known)
    sends zeros and stays in the residual.

    Args:
        rank: number of singular values, at least 1.

    Bytes: ``4 rank (m + n + 1)``, gathered. A tensor for which this is no less than its elements
    travels dense. Source: Atomo (Wang et al. 2018) in its deterministic form.
    """

    name: ClassVar[str] = "svd"
    family: ClassVar[str] = "low rank"
    use: ClassVar[str] = "the best low rank, but slow: to compare with"
    coded: ClassVar[tuple[str, ...]] = ("u", "v", "values")
    shaped: ClassVar[bool] = True

    rank: int = 4

    def __post_init__(self) -> None:
        self._require(is_int(self.rank, 1), "rank", "a whole number from 1")

    def layout(self, spec: TensorSpec) -> Layout:
        m, n = matrix.view(spec.shape)
        if self.rank * (m + n + 1) >= spec.numel:
            return (Part("values", spec.numel, "float32"),)
        return (Part("u", m * self.rank, "float32"), Part("s", self.rank, "float32"),
                Part("v", self.rank * n, "float32"))

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops = ctx.ops
        if len(self.layout(ctx.spec)) == 1:
            return {"values": x}
        of_x = matrix.load(ops, x, matrix.view(ctx.spec.shape))
        u, s, vt = matrix.truncated_svd(ops, of_x, self.rank, matrix.LIMIT / self.rank)
        return {"u": ops.reshape(u, (-1,)), "s": s, "v": ops.reshape(vt, (-1,))}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops = ctx.ops
        if "values" in parts:
            return ops.accumulate(acc, parts["values"])
        u, vt = ops.reshape(parts["u"], (-1, self.rank)), ops.reshape(parts["v"], (self.rank, -1))
        return matrix.add_product(ops, acc, u * ops.reshape(parts["s"], (1, self.rank)), vt)
