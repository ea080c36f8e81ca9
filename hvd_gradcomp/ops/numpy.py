"""The operations on numpy arrays: the reference that the other frameworks are tested against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops.base import ITEMSIZE, ROWS, Array, Ops

_NAMES = {np.dtype(name): name for name in ITEMSIZE}  # numpy makes the name anew each time
_CHUNK = 1 << 16  # elements of a product that stay in the cache


class NumpyOps(Ops):
    name = "numpy"
    in_place = True
    on_host = True

    def host(self, function: Callable[[dict[str, Any]], list[Any]], arrays: Mapping[str, Array],
             returns: Sequence[tuple[int, str]]) -> list[Array]:
        return function(dict(arrays))

    def host_update(self, function: Callable[[dict[str, Any]], None], targets: Mapping[str, Array],
                    arrays: Mapping[str, Array], ok: Array) -> None:
        if ok[0]:
            function({**arrays, **targets})

    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Array:
        return np.zeros(shape, dtype)

    def arange(self, n: int) -> Array:
        return np.arange(n, dtype=np.int32)

    def constant(self, values: Any, dtype: str) -> Array:
        return np.array(values, dtype)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return x.reshape(shape)

    def concat(self, xs: Sequence[Array]) -> Array:
        return np.concatenate(xs)

    def stack_columns(self, xs: Sequence[Array]) -> Array:
        return np.stack(xs, axis=1)

    def cast(self, x: Array, dtype: str) -> Array:
        with np.errstate(invalid="ignore", over="ignore"):
            return x.astype(dtype)

    def bitcast(self, x: Array, dtype: str) -> Array:
        return x.view(dtype) if x.flags.c_contiguous else np.ascontiguousarray(x).view(dtype)

    def fill(self, x: Array, n: int) -> Array:
        return np.repeat(x, n)

    def dtype(self, x: Array) -> str:
        return _NAMES.get(x.dtype) or x.dtype.name

    def abs(self, x: Array) -> Array:
        return np.abs(x)

    def minimum(self, x: Array, y: Array | float) -> Array:
        return np.minimum(x, y)

    def maximum(self, x: Array, y: Array | float) -> Array:
        return np.maximum(x, y)

    def rint(self, x: Array) -> Array:
        return np.rint(x)

    def floor(self, x: Array) -> Array:
        return np.floor(x)

    def count_at_most(self, x: Array, table: Array) -> Array:
        return np.searchsorted(table, x, side="right").astype(np.int32)

    def where(self, condition: Array, x: Array | float, y: Array | float) -> Array:
        return np.where(condition, x, y).astype(np.float32, copy=False)

    def bit_and(self, x: Array, y: Array | int) -> Array:
        return np.bitwise_and(x, y)

    def bit_or(self, x: Array, y: Array) -> Array:
        return np.bitwise_or(x, y)

    def bit_xor(self, x: Array, y: Array) -> Array:
        return np.bitwise_xor(x, y)

    def shift_left(self, x: Array, bits: int) -> Array:
        return np.left_shift(x, bits)

    def shift_right(self, x: Array, bits: int) -> Array:
        return np.right_shift(x.view(np.uint32), bits).view(np.int32)

    def max_rows(self, x: Array) -> Array:
        return x.max(axis=1)

    def min_rows(self, x: Array) -> Array:
        return x.min(axis=1)

    def append_columns(self, x: Array, n: int) -> Array:
        return np.concatenate([x, np.zeros((x.shape[0], n), x.dtype)], axis=1)

    def all_finite(self, x: Array) -> Array:
        return np.isfinite(x).all(keepdims=True).reshape(1).astype(np.float32)

    def top_indices(self, keys: Array, k: int) -> Array:
        n = keys.size
        if k >= n:
            return np.arange(n, dtype=np.int32)
        smallest = np.partition(keys, n - k)[n - k]  # the k-th largest key
        above = np.flatnonzero(keys > smallest)
        ties = np.flatnonzero(keys == smallest)[: k - above.size]
        return np.sort(np.concatenate([above, ties])).astype(np.int32)

    def top_indices_above(self, keys: Array, threshold: Array, k: int) -> Array:
        above = np.flatnonzero(keys >= threshold)
        if above.size >= k:
            return above[self.top_indices(keys[above], k)].astype(np.int32)
        others = np.flatnonzero(keys < threshold)[: k - above.size]
        return np.sort(np.concatenate([above, others])).astype(np.int32)

    def ones(self, bits: Array, k: int) -> Array:
        found = np.flatnonzero(bits).astype(np.int32)
        if found.size != k:
            raise PayloadError(f"{found.size} coded indices in a payload that has {k}")
        return found

    def best_rows(self, x: Array, y: Array, bias: Array) -> Array:
        best = np.empty(x.shape[0], np.int32)
        for start in range(0, x.shape[0], ROWS):
            best[start : start + ROWS] = np.argmax(x[start : start + ROWS] @ y.T - bias, axis=1)
        return best

    def take(self, x: Array, indices: Array) -> Array:
        return x[indices]

    def scatter_add(self, acc: Array, indices: Array, values: Array) -> Array:
        if indices.size and (indices.min() < 0 or indices.max() >= acc.size):
            raise PayloadError(f"index outside 0..{acc.size - 1} in a sparse payload")
        np.add.at(acc, indices, values)
        return acc

    def sqrt(self, x: Array) -> Array:
        return np.sqrt(x)

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        return x.transpose(axes)

    def matmul(self, x: Array, y: Array) -> Array:
        with np.errstate(invalid="ignore", over="ignore"):
            return x @ y

    def add_matmul(self, acc: Array, x: Array, y: Array) -> Array:
        step = max(1, _CHUNK // max(1, y.shape[1]))
        for start in range(0, x.shape[0], step):  # no temporary of the size of acc
            acc[start : start + step] += self.matmul(x[start : start + step], y)
        return acc

    def svd(self, x: Array) -> tuple[Array, Array, Array]:
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                u, s, vt = np.linalg.svd(x, full_matrices=False)
            return u, s, vt
        except np.linalg.LinAlgError:  # no convergence; an error on one rank would hang the others
            k = min(x.shape)
            return self.zeros((x.shape[0], k)), self.zeros((k,)), self.zeros((k, x.shape[1]))

    def cond(self, which: Array, then: Callable[[], Array], otherwise: Callable[[], Array]) -> Array:
        return then() if which[0] else otherwise()

    def accumulate(self, acc: Array, x: Array) -> Array:
        acc += x
        return acc

    def divide(self, x: Array, n: float) -> Array:
        x /= np.float32(n)
        return x

    def assign(self, target: Array, new: Array, ok: Array) -> None:
        if ok[0]:
            target[...] = new

    def poison(self, x: Array, ok: Array) -> Array:
        return x if ok[0] else np.full_like(x, np.nan)
