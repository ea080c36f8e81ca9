"""All gradients of one step, reduced together: one verdict for the whole step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.collectives import hvd_tensorflow
from hvd_gradcomp.collectives.hvd_tensorflow import hvd
from hvd_gradcomp.errors import SpecError, UsageError
from hvd_gradcomp.tensorflow import wire
from hvd_gradcomp.tensorflow.engine import OPS, Bound, Engine, as_written, counted, live

Gradient = Any
"""A tf.Tensor, tf.IndexedSlices or None."""

_NONE, _DENSE, _SPARSE = b"-ds"


class StepReducer:
    """Reduces the gradients of a step: compressed, dense and sparse ones.

    The exchanges run side by side; then one Min all-reduce over everything decides whether the step
    counts. If any gradient on any rank holds an inf or NaN, every result is NaN on every rank and
    no state moves.
    """

    def __init__(self, engine: Engine) -> None:
        self.used = False
        self.sparse: set[int] = set()
        """Variables whose gradients came as IndexedSlices."""
        self._engine = engine
        self._kinds: dict[tuple[int, ...], bytes] = {}
        self._trace: Any = lambda: None
        self._passes = 0
        self.forget()

    def forget(self) -> None:
        """Trace anew, and compare anew which gradients there are: ranks have changed."""
        self._kinds.clear()
        self._traced = tf.function(self._reduce, autograph=False, reduce_retracing=True)

    @as_written
    def __call__(self, grads: Sequence[Gradient], variables: Sequence[tf.Variable], *, op: Any = hvd.Average,
                 predivide: float = 1.0, sparse_as_dense: bool = False) -> list[Gradient]:
        """Reduce ``grads`` of ``variables``, which may be any of the Compression's, in any order.

        A gradient that is None on every rank stays None; on some ranks, it counts there as zeros.
        Which ones are None is compared when these variables come together for the first time.

        Raises:
            SpecError: an op or predivide factor that cannot be honoured.
            UsageError: a variable that was not bound, or a gradient that did not exist before.
            DisagreementError: on every rank, if the ranks were configured differently.
        """
        check_op(op, predivide)
        engine = self._engine
        bounds = [engine.bound(variable) for variable in variables]
        if not bounds:
            return []
        if sparse_as_dense:
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        if not engine.exchanges:
            if not engine.plan.dgc:
                return list(grads)
            if engine.is_member:
                engine.agree()
            return self._alone(grads, bounds)
        self.used = True
        engine.agree()
        grads = self._alike(grads, bounds)
        reduce = self._traced if tf.executing_eagerly() else self._reduce
        return list(reduce(grads, tuple(bound.index for bound in bounds), op, float(predivide)))

    def _reduce(self, grads: Sequence[Gradient], indices: Sequence[int], op: Any, predivide: float) -> list[Gradient]:
        scope = f"{self._engine.name}.{self._pass()}"
        bounds = [self._engine.bounds[index] for index in indices]
        with tf.control_dependencies([self._engine.still()]):
            grads = [None if grad is None else tf.nest.map_structure(tf.identity, grad, expand_composites=True)
                     for grad in grads]
        inputs = [self._prepare(grad, bound) for grad, bound in zip(grads, bounds, strict=True)]
        verdict = self._verdict(inputs, scope)
        stages = [bound.stage() for bound in bounds]
        each = list(zip(inputs, bounds, stages, grads, strict=True))
        compressed = [(bound, stage, x) for x, bound, stage, _ in each
                      if isinstance(x, tf.Tensor) and bound.slot.codec is not None]
        means = {bound.index: mean for (bound, _, _), mean in
                 zip(compressed, self._engine.reduce(compressed, verdict, scope), strict=True)}
        return [None if grad is None else
                counted(bound, stage, self._mean(means[bound.index], grad.dtype, op) if bound.index in means
                        else self._dense(x, bound, grad.dtype, op, predivide, scope, verdict))
                for x, bound, stage, grad in each]

    def _alone(self, grads: Sequence[Gradient], bounds: list[Bound]) -> list[Gradient]:
        """What one rank makes of its own gradients: DGC is an optimizer, not only an exchange."""
        inputs = [self._prepare(grad, bound) for grad, bound in zip(grads, bounds, strict=True)]
        verdict = _finite(inputs)

        def one(grad: Gradient, x: Gradient, bound: Bound) -> Gradient:
            if grad is None or isinstance(grad, tf.IndexedSlices):
                return grad
            if bound.slot.codec is None:
                return OPS.poison(grad, verdict)
            stage = bound.stage()
            mean, = self._engine.reduce([(bound, stage, x)], verdict, "alone")
            return counted(bound, stage, tf.cast(mean, grad.dtype))

        return [one(grad, x, bound) for grad, x, bound in zip(grads, inputs, bounds, strict=True)]

    def _prepare(self, grad: Gradient, bound: Bound) -> Gradient:
        """What is exchanged: slices, or a vector."""
        if grad is None:
            return None
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(live(bound, wire.widen(grad.values)), live(bound, tf.cast(grad.indices, tf.int64)))
        return self._engine.flat(bound, grad) if bound.slot.codec is not None else wire.pack(bound, grad)

    def _verdict(self, inputs: list[Gradient], scope: str) -> tf.Tensor:
        if not self._engine.plan.compresses or all(x is None for x in inputs):
            return tf.ones((1,))  # no state to keep, and NaNs spread by themselves
        return hvd_tensorflow.allreduce(_finite(inputs), hvd.Min, f"{scope}.verdict", self._engine.process_set)

    def _mean(self, mean: tf.Tensor, dtype: tf.DType, op: Any) -> tf.Tensor:
        return tf.cast(mean * float(self._engine.size) if op == hvd.Sum else mean, dtype)

    def _dense(self, x: Gradient, bound: Bound, dtype: tf.DType, op: Any, predivide: float, scope: str,
               verdict: tf.Tensor) -> Gradient:
        engine = self._engine
        name = f"{scope}.{engine.label(bound)}"
        if isinstance(x, tf.IndexedSlices):  # as Horovod does it: everyone's slices, one after the other
            values = hvd_tensorflow.allgather(x.values, f"{name}.values", engine.process_set)
            indices = hvd_tensorflow.allgather(x.indices, f"{name}.indices", engine.process_set)
            values = OPS.poison(values / engine.size if op == hvd.Average else values, verdict)
            return tf.IndexedSlices(wire.narrow(values, dtype), indices, tf.constant(bound.slot.spec.shape, tf.int64))
        if bound.slot.spec.numel:
            x = OPS.poison(hvd_tensorflow.allreduce(x, op, name, engine.process_set, predivide), verdict)
        return wire.unpack(bound, x, dtype)

    def _pass(self) -> int:
        """How many steps this graph holds already (a loop that Python unrolled): their collectives
        may be in flight together, so their names must differ."""
        graph = tf.compat.v1.get_default_graph()
        while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
            graph = graph.outer_graph
        if self._trace() is not graph:
            self._trace, self._passes = weakref.ref(graph), 0
        self._passes += 1
        return self._passes - 1

    # -- gradients that not every rank has ------------------------------------------------------

    def _alike(self, grads: Sequence[Gradient], bounds: list[Bound]) -> list[Gradient]:
        """The gradients in the form in which all ranks exchange them."""
        mine = bytes(_NONE if g is None else _SPARSE if isinstance(g, tf.IndexedSlices) else _DENSE for g in grads)
        key = tuple(bound.index for bound in bounds)
        if key not in self._kinds:
            everyone = hvd_tensorflow.gather_bytes(mine, self._engine.process_set, f"{self._engine.name}.kinds")
            self._kinds[key] = bytes(_common(kinds) for kinds in zip(*everyone, strict=True))
            self.sparse |= {index for index, kind in zip(key, self._kinds[key], strict=True) if kind == _SPARSE}
        return [_as_kind(grad, kind, bound) for grad, kind, bound in zip(grads, self._kinds[key], bounds, strict=True)]


def check_op(op: Any, predivide: float) -> None:
    """Raise SpecError unless compressed gradients can be reduced in this way."""
    if op == hvd.Adasum:
        raise SpecError("op=Adasum combines updates by their angles, which no payload can carry: use op=Average or "
                        "op=Sum with compression")
    if op not in (hvd.Average, hvd.Sum):
        raise SpecError("gradients are reduced with op=Average or op=Sum")
    if predivide != 1.0 and op != hvd.Average:
        raise SpecError("gradient_predivide_factor splits the division of op=Average; op=Sum has none")


def _finite(inputs: list[Gradient]) -> tf.Tensor:
    """float32 ``(1,)``: 1 if all that is there is finite."""
    parts = [OPS.all_finite(x.values if isinstance(x, tf.IndexedSlices) else x) for x in inputs if x is not None]
    return tf.reduce_min(tf.stack([*parts, tf.ones((1,))]), 0)


def _common(kinds: Sequence[int]) -> int:
    """Dense if any rank's gradient is; else sparse if any is; else there is none."""
    return next((kind for kind in (_DENSE, _SPARSE) if kind in kinds), _NONE)


def _as_kind(grad: Gradient, kind: int, bound: Bound) -> Gradient:
    shape = bound.slot.spec.shape
    if (kind == _NONE and grad is not None) or (kind == _SPARSE and isinstance(grad, tf.Tensor)):
        raise UsageError(f"the gradient of {bound.describe()} is of another kind than in the first step with these "
                         "variables (then it was None or sparse on every rank). Pass unconnected_gradients="
                         "tf.UnconnectedGradients.ZERO, or sparse_as_dense=True, if this changes during training")
    if kind == _DENSE:
        return tf.zeros(shape, bound.dtype) if grad is None else tf.convert_to_tensor(grad)
    if kind == _SPARSE and grad is None:
        return tf.IndexedSlices(tf.zeros((0, *shape[1:]), bound.dtype), tf.zeros((0,), tf.int64),
                                tf.constant(shape, tf.int64))
    return grad
