"""What stock Horovod's way of calling a compressor needs: the token as graph ops, and a rule that
says which variable a call is for."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from hvd_gradcomp import token
from hvd_gradcomp.collectives.hvd_tensorflow import hvd
from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.tensorflow.engine import Bound

OURS = ("hvd_gradcomp.tensorflow.DistributedGradientTape(tape, compression=compression) identifies variables and has "
        "no such limit")


class CallOrder:
    """Horovod's stock tape calls ``compress`` without saying for which variable, once for each dense
    gradient, in order. So within one trace the i-th call is for the i-th variable, and a trace with
    more or fewer calls than variables is an error: one gradient less, and those of equal shape
    would silently use each other's residuals."""

    def __init__(self, bounds: list[Bound]) -> None:
        self._bounds = bounds
        self._trace: Any = lambda: None
        self._count = 0
        # The latest trace's number of calls: written while tracing, only read in graphs.
        self._calls = tf.Variable(0, dtype=tf.int64, trainable=False, name="gradcomp_calls")

    def next(self, tensor: tf.Tensor) -> Bound:
        """The variable that this call of ``compress`` is for. Raises UsageError if none fits."""
        if tf.executing_eagerly():
            raise UsageError("stock Horovod reduces gradients inside a graph, but compress() was called eagerly "
                             f"(tf.config.run_functions_eagerly?). {OURS}")
        trace = _reducing_graph()
        if self._trace() is not trace:
            self._trace, self._count = weakref.ref(trace), 0
        if self._count == len(self._bounds):
            raise UsageError(f"Horovod reduces more gradients in one graph than the {len(self._bounds)} variables this "
                             f"Compression was given. {OURS}")
        bound = self._bounds[self._count]
        self._count += 1
        with tf.init_scope():
            self._calls.assign(self._count)
        if not tensor.shape.is_compatible_with(bound.slot.spec.shape) or tensor.dtype != bound.dtype:
            raise UsageError(
                f"gradient {self._count} of this step is {tensor.dtype.name}{tensor.shape.as_list()}, but variable "
                f"{self._count} is {bound.describe()}: stock Horovod does not say which variable a gradient belongs "
                "to, so variables= must list those with a dense gradient in the order of the sources (with groups=, "
                f"of the groups). {OURS}")
        return bound

    def complete(self) -> tf.Operation:
        """Fails at run time unless the trace had a call for every variable."""
        return tf.debugging.Assert(tf.equal(self._calls, len(self._bounds)), [
            f"this Compression was given {len(self._bounds)} variables, but the step reduces another number of dense "
            "gradients (a variable without gradient, or an embedding's IndexedSlices?), so stock Horovod's calls "
            f"cannot be told apart. Pass only variables that get dense gradients, or use our tape: {OURS}. Number of "
            "dense gradients:", self._calls])


def _reducing_graph() -> Any:
    """The graph in which Horovod loops over the gradients; each is reduced in a tf.cond of its own,
    whose branch is the current graph."""
    branch = tf.compat.v1.get_default_graph()
    outer = getattr(branch, "outer_graph", None)
    return outer if hasattr(outer, "outer_graph") else branch


def make_token(ranks: list[int], rank: int, finite: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What Horovod reduces instead of a compressed gradient: the elements of :mod:`hvd_gradcomp.token`
    and one that is NaN unless ``finite``, float32 ``(1,)``. float64 where the gradient is, else
    float32: halves would be too coarse to tell process sets apart."""
    elements = token.values(ranks, rank, hvd.size())
    flag = tf.cast(tf.where(finite > 0.0, 1.0, float("nan")), dtype)
    return tf.concat([tf.constant(elements, dtype), flag], 0)


def token_nbytes() -> int:
    """Bytes of a float32 token."""
    return 4 * (len(token.expected([0], hvd.size())) + 1)


class Token:
    """A reduced token."""

    def __init__(self, reduced: tf.Tensor) -> None:
        self.one, self._elements, self._flag = reduced[0], reduced[:-1], reduced[-1]

    @property
    def verdict(self) -> tf.Tensor:
        """float32 ``(1,)``: 1 if this tensor is finite on every rank, else 0."""
        return tf.reshape(tf.cast(tf.math.is_finite(self._flag), tf.float32), (1,))

    @property
    def factor(self) -> tf.Tensor:
        """:func:`hvd_gradcomp.token.factor`, float32."""
        nearest = tf.math.rint(self.one)
        close = tf.abs(self.one - nearest) <= token.SNAP * tf.maximum(tf.abs(self.one), 1.0)
        return tf.cast(tf.where(close, nearest, self.one), tf.float32)

    def check(self, ranks: list[int]) -> tf.Operation:
        """:func:`hvd_gradcomp.token.check` at run time: fails with a tf.errors.InvalidArgumentError."""
        size = hvd.size()
        want = self.one * tf.constant(token.expected(ranks, size), self.one.dtype)
        same = tf.reduce_all(tf.abs(self._elements - want) <= token.tolerance(size) * tf.abs(self.one))
        return tf.debugging.Assert(same, [token.mismatch(ranks)
                                          + " (or op= is neither Average nor Sum, which compression cannot honour)"])
