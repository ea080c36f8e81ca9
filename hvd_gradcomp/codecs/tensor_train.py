"""``tt`` and ``tr``: a chain, or a ring, of small cores, one for each dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import matrix
from hvd_gradcomp.codecs.base import Codec, Ctx, is_int
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

_MAX_DIMS = 64  # of a tensor, in every framework


def modes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions that get a core each.

    Dimensions of 1 are dropped. Three or more dimensions are taken as they are (convolutions:
    output, input, height, width). A matrix, or a vector as :func:`matrix.view` lays it out, has
    each dimension split in the two factors nearest to its square root (4096 is 64 x 64; a prime
    stays whole).
    """
    dims = tuple(d for d in shape if d != 1)
    if len(dims) > 2:
        return dims
    return tuple(d for side in matrix.view(dims) for d in _balanced(side) if d != 1) or (1,)


def _balanced(d: int) -> tuple[int, int]:
    low = next(factor for factor in range(math.isqrt(d), 0, -1) if d % factor == 0)
    return low, d // low


@dataclass(frozen=True)
class TensorTrain(Codec):
    """Tensor-train decomposition: ``x[i, j, ..., k] = A[i] B[j] ... Z[k]``, a product of one small
    matrix for each index; the cores ``A [1, d1, r1], B [r1, d2, r2], ..., Z [r, d, 1]`` travel.

    TT-SVD: the first dimension against the rest is decomposed and cut to ``rank``, what remains goes
    on with the next dimension. Inner ranks are cut to the sides of each unfolding. The cores are one
    per dimension of :func:`modes`.

    Limits: exact if no unfolding has a higher rank; else the error is at most ``sqrt(modes - 1)``
    times that of the best tensor train of these ranks, and never longer than the input. That it
    falls with a higher rank is measured, not proven. The cost is that of decomposing the first
    dimension against the rest: ``d1^2`` times the rest. On CUDA the host waits for the device, once
    for each core but one. Non-finite elements count as 0.

    Args:
        rank: largest inner rank, at least 1.

    Bytes: 4 times the sum of ``r d r'`` over the cores, gathered. A tensor for which this is no
    less than its elements travels dense. Source: Oseledets (2011), Algorithm 1.
    """

    name: ClassVar[str] = "tt"
    family: ClassVar[str] = "low rank"
    use: ClassVar[str] = "small cores for huge tensors; for those with structure"
    coded: ClassVar[tuple[str, ...]] = ("values", *(f"core{i}" for i in range(_MAX_DIMS)))
    shaped: ClassVar[bool] = True

    rank: int = 4

    def __post_init__(self) -> None:
        self._require(is_int(self.rank, 1), "rank", "a whole number from 1")

    def layout(self, spec: TensorSpec) -> Layout:
        cores = tuple(Part(f"core{i}", math.prod(shape), "float32") for i, shape in enumerate(self._cores(spec)))
        if sum(core.length for core in cores) >= spec.numel:
            return (Part("values", spec.numel, "float32"),)
        return cores

    def _ring(self, limit: int) -> int:
        """The rank that closes the ring, if the first unfolding has no rank above ``limit``."""
        return 1

    def _cores(self, spec: TensorSpec) -> list[tuple[int, int, int]]:
        """``(rank before, dimension, rank after)`` of each core."""
        dims = modes(spec.shape)
        rest = math.prod(dims) // dims[0]
        limit = min(dims[0], rest)
        ring = self._ring(limit)
        before, cores = ring, []
        for i, d in enumerate(dims):
            if i == len(dims) - 1:
                after = ring
            elif i == 0:
                after = min(self.rank, math.ceil(limit / ring))
            else:
                rest //= d
                after = min(self.rank, before * d, rest * ring)
            cores.append((before, d, after))
            before = after
        return cores

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops = ctx.ops
        if len(self.layout(ctx.spec)) == 1:
            return {"values": x}
        cores, parts = self._cores(ctx.spec), {}
        ring, d, after = cores[0]
        unfolding = ops.reshape(ops.pad(x, math.prod(modes(ctx.spec.shape))), (d, -1))
        left, rest = self._split(unfolding, ring * after, ctx)
        parts["core0"] = ops.reshape(ops.permute(ops.reshape(left, (d, ring, after)), (1, 0, 2)), (-1,))
        # The ring's index goes to the very end, where the last core keeps it.
        rest = ops.permute(ops.reshape(rest, (ring, after, -1)), (1, 2, 0))
        for i, (before, d, after) in enumerate(cores[1:-1], 1):
            left, rest = self._split(ops.reshape(rest, (before * d, -1)), after, ctx)
            parts[f"core{i}"] = ops.reshape(left, (-1,))
        parts[f"core{len(cores) - 1}"] = ops.reshape(rest, (-1,))
        return parts

    def _split(self, unfolding: Array, rank: int, ctx: Ctx) -> tuple[Array, Array]:
        """``left [m, rank] right [rank, n]``, the nearest product; ``left`` has orthonormal columns, zeros
        behind them if ``rank > min(m, n)``."""
        ops = ctx.ops
        # Decoding adds up to rank**2 products.
        left, s, vt = matrix.truncated_svd(ops, unfolding, rank, matrix.LIMIT / self.rank**2)
        kept = int(s.shape[0])
        right = ops.reshape(s, (kept, 1)) * vt
        if kept < rank:
            left = ops.append_columns(left, rank - kept)
            right = ops.concat([right, ops.zeros((rank - kept, int(right.shape[1])))])
        return left, right

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops = ctx.ops
        if "values" in parts:
            return ops.accumulate(acc, parts["values"])
        shapes = self._cores(ctx.spec)
        cores = [ops.reshape(parts[f"core{i}"], shape) for i, shape in enumerate(shapes)]
        ring, dims = shapes[0][0], [d for _, d, _ in shapes]
        # Multiply from both ends up to where the two sides are nearest in size, then once.
        middle = min(range(1, len(dims)), key=lambda i: math.prod(dims[:i]) + math.prod(dims[i:]))
        left, right = cores[0], cores[-1]
        for core in cores[1:middle]:
            before, d, after = core.shape
            left = ops.matmul(ops.reshape(left, (-1, before)), ops.reshape(core, (before, d * after)))
            left = ops.reshape(left, (ring, -1, after))
        for core in cores[-2 : middle - 1 : -1]:
            before, d, after = core.shape
            right = ops.matmul(ops.reshape(core, (before * d, after)), ops.reshape(right, (after, -1)))
            right = ops.reshape(right, (before, -1, ring))
        inner = ring * shapes[middle][0]
        left = ops.reshape(ops.permute(left, (1, 0, 2)), (-1, inner))
        right = ops.reshape(ops.permute(right, (2, 0, 1)), (inner, -1))
        return matrix.add_product(ops, acc, left, right)


@dataclass(frozen=True)
class TensorRing(TensorTrain):
    """Tensor-ring decomposition: ``x[i, j, ..., k] = trace(A[i] B[j] ... Z[k])``; a tensor train whose
    ends are joined by one more rank, so that no core is thinner than the others.

    TR-SVD: the first unfolding is cut to ``r0 r1`` (``r0`` up to ``rank``, about the square root of
    what the unfolding allows), the rest goes on as in ``tt``, with ``r0`` carried to the last core.

    Limits: as ``tt``, but without its bound on the error. Keeps more of the first dimension than
    ``tt`` of the same rank, at a cost of up to ``rank`` times the bytes of the first and last core.

    Args:
        rank: largest rank between two cores, at least 1.

    Bytes: 4 times the sum of ``r d r'`` over the cores, gathered; dense where that is no less than
    the elements. Source: Zhao et al. (2016), Algorithm 1.
    """

    name: ClassVar[str] = "tr"
    use: ClassVar[str] = "like tt, with equal cores all round"

    def _ring(self, limit: int) -> int:
        return min(self.rank, math.isqrt(max(limit - 1, 0)) + 1)
