"""A tensor as a matrix, and rows made orthonormal: what the low-rank codecs share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from hvd_gradcomp.ops import rng
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.spec import TensorSpec

LIMIT = 2.0**124
"""What is sent stays below, so that neither it nor what is left (``x`` up to ``2**128``) overflows."""
_LARGEST = 3.4028234663852886e38  # finite float32
_TINY = 2.0**-100  # taken as 0: products with less reach the denormals, which TensorFlow flushes
_NOISE = 2.0**-16  # a row is no direction if this share of the largest element is not left of it


def view(shape: tuple[int, ...]) -> tuple[int, int]:
    """``(m, n)``: the first dimension by the rest. A vector (all dimensions 1 but one) becomes the
    most square matrix that holds it; the few elements beyond its end are zeros and never show."""
    numel = math.prod(shape)
    if numel and numel not in (shape[0] if shape else 1, math.prod(shape[1:])):
        return shape[0], math.prod(shape[1:])
    m = math.isqrt(max(numel - 1, 0)) + 1
    return m, math.ceil(numel / m)


def load(ops: Ops, x: Array, shape: tuple[int, int]) -> Array:
    """The vector ``x`` as a matrix of :func:`view`; without a copy where nothing is padded."""
    return ops.reshape(ops.pad(x, shape[0] * shape[1]), shape)


class Products(Protocol):
    """What is to be compressed, a matrix ``M [m, n]``, as far as power iteration looks at it."""

    def left(self, q: Array) -> Array:
        """``(M q^T)^T``, ``[r, m]``, for ``q`` ``[r, n]``."""

    def right(self, p: Array) -> Array:
        """``p M``, ``[r, n]``, for ``p`` ``[r, m]``."""


class DenseProducts:
    """Those of a vector seen as a matrix."""

    def __init__(self, ops: Ops, x: Array, shape: tuple[int, int]) -> None:
        self.ops, self.matrix = ops, load(ops, x, shape)

    def left(self, q: Array) -> Array:
        return self.ops.permute(self.ops.matmul(self.matrix, self.ops.permute(q, (1, 0))), (1, 0))

    def right(self, p: Array) -> Array:
        return self.ops.matmul(p, self.matrix)


@dataclass(frozen=True)
class Product:
    """The elements of ``left right``, ``[m, r]`` times ``[r, n]``: called with a vector it adds them."""

    ops: Ops
    left: Array
    right: Array

    def __call__(self, acc: Array) -> Array:
        return add_product(self.ops, acc, self.left, self.right)


def add_product(ops: Ops, acc: Array, left: Array, right: Array) -> Array:
    """The vector ``acc`` plus the elements of ``left right`` that it has; ``acc`` is used up."""
    numel, m, n = int(acc.shape[0]), int(left.shape[0]), int(right.shape[1])
    if m * n == numel:
        return ops.reshape(ops.add_matmul(ops.reshape(acc, (m, n)), left, right), (numel,))
    return ops.accumulate(acc, ops.reshape(ops.matmul(left, right), (m * n,))[:numel])


def finite(ops: Ops, x: Array) -> Array:
    """``x`` with 0 for NaN and infinities: decompositions fail on them, and the step is void anyway."""
    return ops.where(ops.abs(x) <= _LARGEST, x, 0.0)


def limit(ops: Ops, x: Array, largest: float) -> Array:
    """``x`` cut to ``-largest .. largest``; 0 for NaN and below 2**-100."""
    x = ops.minimum(ops.maximum(x, -largest), largest)
    return ops.where(ops.abs(x) >= _TINY, x, 0.0)


def truncated_svd(ops: Ops, x: Array, rank: int, largest: float) -> tuple[Array, Array, Array]:
    """``u [m, k], s [k], vt [k, n]`` of the ``k = min(rank, m, n)`` largest singular values of ``x``, which
    may hold anything: elements that are not finite count as 0. ``s`` as :func:`limit` leaves it.

    The signs of the singular vectors, which the libraries choose differently, follow a rule: each
    column of ``u`` has a positive product with ``sqrt(2), sqrt(3), ...``.
    """
    x = finite(ops, x)
    if x.shape[0] >= x.shape[1]:
        u, s, vt = ops.svd(x)
    else:  # the libraries are several times faster with the long side first
        v, s, ut = ops.svd(ops.permute(x, (1, 0)))
        u, vt = ops.permute(ut, (1, 0)), ops.permute(v, (1, 0))
    m, k = int(u.shape[0]), min(rank, int(s.shape[0]))
    weights = ops.sqrt(ops.cast(ops.arange(m), "float32") + 2.0)
    products = ops.sum_rows(ops.permute(u[:, :k], (1, 0)) * weights)
    sign = ops.where(products < 0.0, 0.0 * products - 1.0, 0.0 * products + 1.0)
    return u[:, :k] * sign, limit(ops, s[:k], largest), vt[:k] * ops.reshape(sign, (k, 1))


def random_rows(ops: Ops, rows: int, n: int, *, seed: int, spec: TensorSpec, step: Array, stream: int = 0) -> Array:
    """``[rows, n]`` of magnitude 1/2 to 1 and random sign, the same on every rank."""
    draws = rng.uniform(ops, rows * n, seed=seed, spec=spec, step=step, rank=rng.SHARED, stream=stream)
    return ops.reshape(ops.where(draws < 0.5, draws - 1.0, draws), (rows, n))


def orthonormal(ops: Ops, rows: Array, spare: Array) -> Array:
    """Orthonormal ``[r, n]`` (``r <= n``) whose first rows span what those of ``rows`` span.

    Modified Gram-Schmidt, done twice (Giraud et al. 2005: then orthogonal to working precision).
    A row that is zero, not finite or but noise beside the others is replaced by the same row of
    ``spare``; so zeros give an orthonormal basis of ``spare``. Elementwise operations and
    :meth:`Ops.sum_rows` alone: the same bits on every rank, device and framework.
    """
    rows = finite(ops, rows)
    count, n = int(rows.shape[0]), int(rows.shape[1])
    top = ops.max_rows(ops.reshape(ops.abs(rows), (1, count * n)))
    rows = _gram_schmidt_with_spare(ops, rows / ops.where(top > _TINY, top, 1.0), spare)
    return _gram_schmidt(ops, rows)


def _gram_schmidt(ops: Ops, rows: Array) -> Array:
    done = []
    while int(rows.shape[0]):
        row, dots = rows[:1], ops.sum_rows(rows * rows[:1])
        squared = ops.maximum(dots[:1], _TINY)
        done.append(row / ops.sqrt(squared))
        rows = (rows - ops.reshape(dots / squared, (-1, 1)) * row)[1:]
    return ops.concat(done)


def _gram_schmidt_with_spare(ops: Ops, rows: Array, spare: Array) -> Array:
    """The rows have a largest element of 1. Spare rows are projected along, ready to step in."""
    done = []
    left = int(rows.shape[0])
    while left:
        both = ops.concat([rows, spare])
        dots = ops.sum_rows(ops.concat([both * rows[:1], both * spare[:1]]))  # one sum for all: it is many small steps
        own, others = dots[: 2 * left], dots[2 * left :]
        sound = own[:1] > _NOISE**2
        row = ops.where(sound, rows[:1], spare[:1])
        squared = ops.maximum(ops.where(sound, own[:1], others[left : left + 1]), _TINY)
        done.append(row / ops.sqrt(squared))
        both = both - ops.reshape(ops.where(sound, own, others) / squared, (-1, 1)) * row
        rows, spare, left = both[1:left], both[left + 1 :], left - 1
    return ops.concat(done)
