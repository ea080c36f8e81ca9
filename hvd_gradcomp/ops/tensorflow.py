"""The operations on TensorFlow tensors, eager or traced. State arrays are ``tf.Variable``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.ops.base import ROWS, Array, Ops


class TensorflowOps(Ops):
    name = "tensorflow"
    in_place = False

    @property
    def on_host(self) -> bool:
        return not tf.config.get_visible_devices("GPU")

    def host(self, function: Callable[[dict[str, Any]], list[Any]], arrays: Mapping[str, Array],
             returns: Sequence[tuple[int, str]]) -> list[Array]:
        names = list(arrays)
        results = tf.numpy_function(lambda *values: function(dict(zip(names, values, strict=True))),
                                    [tf.convert_to_tensor(x) for x in arrays.values()],
                                    [tf.as_dtype(dtype) for _, dtype in returns])
        # eagerly a list of one comes back as its element
        return [tf.ensure_shape(x, (length,)) for x, (length, _) in zip(tf.nest.flatten(results), returns, strict=True)]

    def host_update(self, function: Callable[[dict[str, Any]], None], targets: Mapping[str, Array],
                    arrays: Mapping[str, Array], ok: Array) -> None:
        def changed(given: dict[str, Any]) -> list[Any]:
            if given.pop("ok")[0]:
                given |= {name: given[name].copy() for name in targets}
                function(given)
            return [given[name] for name in targets]

        new = self.host(changed, {**arrays, **targets, "ok": ok},
                        [(int(target.shape[0]), target.dtype.name) for target in targets.values()])
        for target, value in zip(targets.values(), new, strict=True):
            target.assign(value)

    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Array:
        return tf.zeros(shape, dtype)

    def arange(self, n: int) -> Array:
        return tf.range(n, dtype=tf.int32)

    def constant(self, values: Any, dtype: str) -> Array:
        return tf.constant(values, dtype)

    def scalar(self, value: float) -> Array:
        # Grappler folds constants but leaves what could be fed with another value alone
        return tf.raw_ops.PlaceholderWithDefault(input=tf.constant([value], tf.float32), shape=(1,))

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return tf.reshape(x, shape)

    def concat(self, xs: Sequence[Array]) -> Array:
        return tf.concat(xs, 0)

    def stack_columns(self, xs: Sequence[Array]) -> Array:
        return tf.stack(xs, axis=1)

    def cast(self, x: Array, dtype: str) -> Array:
        return tf.cast(x, dtype)

    def bitcast(self, x: Array, dtype: str) -> Array:
        size, target = x.dtype.size, tf.as_dtype(dtype)
        if size < target.size:  # narrow to wide: the bytes of one element become the last axis
            x = tf.reshape(x, (-1, target.size // size))
        return tf.reshape(tf.bitcast(x, target), (-1,))

    def fill(self, x: Array, n: int) -> Array:
        return tf.repeat(x, n)

    def dtype(self, x: Array) -> str:
        return str(x.dtype.name)

    def abs(self, x: Array) -> Array:
        return tf.abs(x)

    def minimum(self, x: Array, y: Array | float) -> Array:
        return tf.minimum(x, y)

    def maximum(self, x: Array, y: Array | float) -> Array:
        return tf.maximum(x, y)

    def rint(self, x: Array) -> Array:
        return tf.math.rint(x)

    def floor(self, x: Array) -> Array:
        return tf.floor(x)

    def count_at_most(self, x: Array, table: Array) -> Array:
        return tf.searchsorted(table, x, side="right")

    def where(self, condition: Array, x: Array | float, y: Array | float) -> Array:
        return tf.where(condition, x, y)

    def bit_and(self, x: Array, y: Array | int) -> Array:
        return tf.bitwise.bitwise_and(x, y)

    def bit_or(self, x: Array, y: Array) -> Array:
        return tf.bitwise.bitwise_or(x, y)

    def bit_xor(self, x: Array, y: Array) -> Array:
        return tf.bitwise.bitwise_xor(x, y)

    def shift_left(self, x: Array, bits: int) -> Array:
        return tf.bitwise.left_shift(x, bits)

    def shift_right(self, x: Array, bits: int) -> Array:
        # uint32 shifts are logical; a bitcast is free
        return tf.bitcast(tf.bitwise.right_shift(tf.bitcast(x, tf.uint32), tf.constant(bits, tf.uint32)), tf.int32)

    def max_rows(self, x: Array) -> Array:
        return tf.reduce_max(x, 1)

    def min_rows(self, x: Array) -> Array:
        return tf.reduce_min(x, 1)

    def append_columns(self, x: Array, n: int) -> Array:
        return tf.pad(x, [[0, 0], [0, n]])

    def all_finite(self, x: Array) -> Array:
        return tf.reshape(tf.cast(tf.reduce_all(tf.math.is_finite(x)), tf.float32), (1,))

    def top_indices(self, keys: Array, k: int) -> Array:
        n = int(keys.shape[0])
        if k >= n:
            return self.arange(n)
        # tf.math.top_k promises that of two equal elements the one with the lower index comes first
        return tf.sort(tf.math.top_k(keys, k, sorted=True).indices)

    def top_indices_above(self, keys: Array, threshold: Array, k: int) -> Array:
        passed = keys >= threshold
        above = tf.reshape(tf.cast(tf.where(passed), tf.int32), (-1,))
        count = tf.size(above)

        def enough() -> Array:
            return tf.gather(above, tf.math.top_k(tf.gather(keys, above), k, sorted=True).indices)

        def too_few() -> Array:
            others = tf.reshape(tf.cast(tf.where(tf.logical_not(passed)), tf.int32), (-1,))
            return tf.concat([above, others[: k - count]], 0)

        return tf.ensure_shape(tf.sort(tf.cond(count >= k, enough, too_few)), (k,))

    def ones(self, bits: Array, k: int) -> Array:
        return tf.ensure_shape(tf.reshape(tf.cast(tf.where(bits > 0), tf.int32), (-1,)), (k,))

    def best_rows(self, x: Array, y: Array, bias: Array) -> Array:
        def best(part: Array) -> Array:
            return tf.argmax(tf.matmul(part, y, transpose_b=True) - bias, 1, tf.int32)

        rows, width = int(x.shape[0]), int(x.shape[1])
        if rows <= ROWS:
            return best(x)
        chunks = -(-rows // ROWS)
        parts = tf.reshape(tf.pad(x, [[0, chunks * ROWS - rows], [0, 0]]), (chunks, ROWS, width))
        return tf.reshape(tf.map_fn(best, parts, parallel_iterations=1, fn_output_signature=tf.int32), (-1,))[:rows]

    def take(self, x: Array, indices: Array) -> Array:
        return tf.gather(x, indices)

    def scatter_add(self, acc: Array, indices: Array, values: Array) -> Array:
        return tf.tensor_scatter_nd_add(acc, tf.reshape(indices, (-1, 1)), values)

    def sqrt(self, x: Array) -> Array:
        return tf.sqrt(x)

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        return tf.transpose(x, axes)

    def matmul(self, x: Array, y: Array) -> Array:
        return tf.matmul(x, y)

    def add_matmul(self, acc: Array, x: Array, y: Array) -> Array:
        return acc + tf.matmul(x, y)

    def svd(self, x: Array) -> tuple[Array, Array, Array]:
        s, u, v = tf.linalg.svd(x)
        return u, s, tf.transpose(v)

    def cond(self, which: Array, then: Callable[[], Array], otherwise: Callable[[], Array]) -> Array:
        return tf.cond(tf.reshape(which, ()), then, otherwise)

    def accumulate(self, acc: Array, x: Array) -> Array:
        # Not acc + x: in a tf.function a chain of additions becomes one AddN, in whatever order. As an
        # update of a row it keeps its place, and the accumulator its storage.
        n = int(acc.shape[0])
        sums = tf.tensor_scatter_nd_add(tf.reshape(acc, (1, n)), [[0]], tf.reshape(x, (1, n)))
        return tf.reshape(sums, (n,))

    def divide(self, x: Array, n: float) -> Array:
        # a plain division by a constant becomes a multiplication by its inverse in a tf.function
        return tf.math.divide_no_nan(x, tf.constant(n, x.dtype))

    def assign(self, target: Array, new: Array, ok: Array) -> None:
        target.assign(tf.where(tf.cast(ok, tf.bool), new, target))

    def poison(self, x: Array, ok: Array) -> Array:
        return tf.where(tf.cast(ok, tf.bool), x, float("nan"))
