"""The variables of one Compression, and how one gradient of theirs is reduced inside a graph."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from hvd_gradcomp import agreement, state
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.collectives import hvd_tensorflow, local, process_sets
from hvd_gradcomp.collectives.hvd_tensorflow import hvd
from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.exchange import with_hosts
from hvd_gradcomp.exchange.base import Flow
from hvd_gradcomp.flow import reduce_gradient
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.ops.tensorflow import TensorflowOps
from hvd_gradcomp.plan import Exchanges, Plan, Slot
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.spec import TensorSpec

OPS = TensorflowOps()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_written(function: _Function) -> _Function:
    """Mark a function that AutoGraph must not rewrite when a ``tf.function`` calls it."""
    return tf.autograph.experimental.do_not_convert(function)


@dataclass(eq=False)
class Bound:
    """A variable: its slot, and how often it was reduced in each stage (counted in the graph)."""

    index: int
    slot: Slot
    variable: tf.Variable
    steps: tf.Variable

    @property
    def dtype(self) -> tf.DType:
        return self.variable.dtype

    def stage(self) -> tf.Tensor:
        """Index of the stage that the next reduction is in, int32 ``()``."""
        if len(self.slot.stages) <= 1:
            return tf.constant(0)
        return tf.reduce_sum(tf.cast(self.slot.state["step"] >= self.slot.begins, tf.int32)) - 1

    def describe(self) -> str:
        return f"{self.slot.spec.name!r} ({self.dtype.name}{list(self.slot.spec.shape)})"


class Engine:
    """Holds all state as variables that exist before any graph is traced, each of them touched by
    one tensor's ops only (a shared one would make the exchanges run one after another)."""

    def __init__(self, variables: Iterable[Any], policy: Policy, *, exchange: Exchanges, process_set: Any,
                 loss_scale: Any, seed: int, error_feedback: bool, verify: bool = False,
                 sgd: Callable[[tf.Variable], Momentum] | None = None) -> None:
        if not tf.executing_eagerly():  # tf.init_scope() is eager
            raise UsageError("create the Compression once, outside of any tf.function: its residuals must outlive "
                             "the step")
        listed = list(variables)
        if not listed:
            raise UsageError("variables is empty: pass model.trainable_variables of a model that is built")
        tensors = [unwrap(variable) for variable in listed]
        names = _names(listed)
        dtypes = {name: tensor.dtype for name, tensor in zip(names, tensors, strict=True)}
        self.plan = Plan.make(
            [TensorSpec(name, tuple(tensor.shape), tensor.dtype.name)
             for name, tensor in zip(names, tensors, strict=True)], policy,
            ranks=process_set.size() or 1, seed=seed, error_feedback=error_feedback, dgc=sgd is not None,
            verify=verify,
            exchange=with_hosts(exchange, lambda: process_sets.local_size(hvd, process_set)),
            refuse=lambda spec: "" if dtypes[spec.name].is_floating else f"dtype {dtypes[spec.name].name}")
        self.process_set = process_set
        self.loss_scale = loss_scale
        self.sgd = sgd
        self.name = ""
        """Prefix of our collectives; empty until the ranks have agreed."""
        self._sets: process_sets.Sets = {}
        self.place = 0, 0
        """``(rank, ranks)`` when they did."""
        self._world, self._worlds = 0, _allocate("world", 1, "int32")  # how often ranks may have changed
        self.bounds: list[Bound] = []
        for slot, tensor in zip(self.plan.slots.values(), tensors, strict=True):
            self.plan.allocate(slot, _allocate)
            steps = _allocate("steps", max(len(slot.stages), 1), "int64")
            self.bounds.append(Bound(len(self.bounds), slot, tensor, steps))
        self._by_ref = {tensor.ref(): bound for tensor, bound in zip(tensors, self.bounds, strict=True)}
        if len(self._by_ref) != len(listed):
            raise UsageError("a variable was given twice in variables=")

    @property
    def size(self) -> int:
        """Ranks that reduce together."""
        return int(self.process_set.size())

    @property
    def is_member(self) -> bool:
        """Whether this rank is one of them."""
        return bool(self.process_set.included())

    @property
    def exchanges(self) -> bool:
        """Whether there is anybody to exchange with."""
        return self.is_member and self.size > 1

    def bound(self, variable: tf.Variable) -> Bound:
        """What belongs to a variable. Raises UsageError if it was not given in ``variables=``."""
        try:
            return self._by_ref[variable.ref()]
        except KeyError:
            raise UsageError(f"{_names([variable])[0]!r} is not one of the {len(self.bounds)} variables that this "
                             "Compression was given as variables=") from None

    def agree(self) -> None:
        """Before the first exchange, while its graph is traced: compare the ranks' plans.

        Raises DisagreementError on every rank if they differ.
        """
        if self.name:
            return
        old, place = self.plan, (int(self.process_set.rank()), self.size)
        with tf.init_scope():  # what is made and exchanged here belongs to no graph
            if old.ranks != self.size:
                self.use(old.for_ranks(self.size))
                for slot in self.plan.slots.values():
                    self.plan.allocate(slot, _allocate)
            name = agreement.new_name(self.process_set.ranks)
            places = [self.place]
            if self.size > 1:
                agreement.check(self.plan, lambda data: hvd_tensorflow.gather_bytes(data, self.process_set, name))
                self._sets = process_sets.connect(hvd, self.process_set, self.plan.exchanges)
                mine = json.dumps(self.place).encode()
                places = [tuple(json.loads(each)) for each in
                          hvd_tensorflow.gather_bytes(mine, self.process_set, f"{name}.places")]
            if {ranks for _, ranks in places} not in ({0}, {self.size}):
                self._spread(old, places)
        self.name, self.place = name, place

    def _spread(self, old: Plan, places: list[tuple[int, int]]) -> None:
        def broadcast(array: Any, root: int, name: str) -> Any:
            if self.size == 1:
                return array
            return hvd.broadcast(tf.constant(array), self.process_set.ranks[root], name=name,
                                 process_set=self.process_set).numpy()

        def add(array: Any, name: str) -> Any:
            if self.size == 1:
                return array
            return hvd.allreduce(tf.constant(array), op=hvd.Sum, name=name, process_set=self.process_set).numpy()

        state.spread(old, self.plan, places, self.process_set.rank(), broadcast=broadcast, add=add,
                     store=lambda target, array: target.assign(array))

    # -- Horovod's elastic mode -----------------------------------------------------------------

    def rejoin(self) -> None:
        """Ranks may have changed: before the next exchange compare their configurations again, and spread what is
        kept if they have. Graphs traced before fail from now on."""
        self.name = ""
        self._world += 1
        self._worlds.assign([self._world])

    def use(self, plan: Plan) -> None:
        """Go on with another plan of the same tensors."""
        self.plan = plan
        for bound in self.bounds:
            bound.slot = plan.slots[bound.slot.spec.name]

    def still(self) -> tf.Operation:
        """Fails at run time if the ranks have changed since this graph was traced: the number of ranks, and what is
        kept for them, are part of it."""
        return tf.raw_ops.Assert(condition=tf.equal(self._worlds[0], self._world), data=[
            "this graph was traced before the ranks changed: make the tf.function that reduces gradients inside the "
            "function that hvd_gradcomp.tensorflow.elastic.run calls, and reduce with our tape or optimizers"])

    def flat(self, bound: Bound, grad: tf.Tensor) -> tf.Tensor:
        """A gradient as the codecs take it: float32 ``[numel]``."""
        return live(bound, tf.reshape(tf.cast(grad, tf.float32), (bound.slot.spec.numel,)))

    def reduce(self, inputs: Sequence[tuple[Bound, tf.Tensor, tf.Tensor]], verdict: tf.Tensor,
               scope: str) -> list[tf.Tensor]:
        """The means over ranks, float32 in the variables' shapes; NaN if the verdict, float32 ``(1,)``, is 0.

        A schedule's stages are the branches of one switch, since their payloads differ in size.
        A rank that exchanges with nobody runs a world of one.

        Args:
            inputs: variable, stage, and ``x`` from :meth:`flat`.
            scope: begins the names of the collectives.
        """
        scale = self.scale()

        def run(stages: dict[str, tuple[Bound, tf.Tensor, int]]) -> dict[str, tf.Tensor]:
            flows = {f"{scope}.{label}.{number}": self._flow(bound, x, number, scale)
                     for label, (bound, x, number) in stages.items()}
            if self.exchanges:
                means = hvd_tensorflow.run(flows, self._sets, verdict)
            else:
                means = {name: local.alone(OPS, flow, verdict) for name, flow in flows.items()}
            return {label: tf.reshape(means[f"{scope}.{label}.{number}"], bound.slot.spec.shape)
                    for label, (bound, _, number) in stages.items()}

        def switch(bound: Bound, stage: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
            label = self.label(bound)
            return tf.switch_case(stage, [lambda number=number: run({label: (bound, x, number)})[label]
                                          for number in range(len(bound.slot.stages))])

        means = run({self.label(bound): (bound, x, 0) for bound, _, x in inputs if len(bound.slot.stages) == 1})
        return [means[self.label(bound)] if len(bound.slot.stages) == 1 else switch(bound, stage, x)
                for bound, stage, x in inputs]

    def _flow(self, bound: Bound, x: tf.Tensor, stage: int, loss_scale: tf.Tensor | None) -> Flow:
        slot, plan = bound.slot, self.plan
        ranks, rank = (self.size, int(self.process_set.rank())) if self.exchanges else (1, 0)
        ctx = Ctx(OPS, slot.spec, ranks, rank, plan.seed, state=slot.state, error_feedback=plan.error_feedback)
        return reduce_gradient(x, slot, ctx, stage=stage, loss_scale=loss_scale,
                               sgd=self.sgd(bound.variable) if self.sgd else None)

    def label(self, bound: Bound) -> str:
        """A variable's name as Horovod's ops may carry it: unique by its number."""
        return f"{bound.index}." + re.sub(r"[^A-Za-z0-9_.]", "_", bound.slot.spec.name)

    def scale(self) -> tf.Tensor | None:
        """What the loss is multiplied by now, float32; None for 1."""
        scale = self.loss_scale
        if scale is None:
            return None
        if callable(scale):
            scale = scale()
        return tf.cast(tf.convert_to_tensor(unwrap(scale)), tf.float32)


def live(bound: Bound, x: tf.Tensor) -> tf.Tensor:
    """``x``, not 0-d, as something that only the run can know, without a copy.

    TensorFlow takes Horovod's ops for pure functions: it runs one with a constant input once, while
    it optimizes the graph, and merges two with equal inputs. If a rank's gradient is a constant (the
    zeros of a variable that it does not use), its peers would then wait for ever. A reshape whose
    shape comes from the variable's own counter stops that.
    """
    zero = tf.cast(tf.minimum(bound.steps[0], 0), tf.int32)
    out = tf.reshape(x, tf.shape(x) + zero)
    out.set_shape(x.shape)
    return out


def unwrap(variable: Any) -> Any:
    """The ``tf.Variable`` inside a Keras 3 variable; anything else as it is."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value  # tf.Variable.value is a method


def global_set(process_set: Any) -> Any:
    """``process_set``, or Horovod's global one for None."""
    return hvd.global_process_set if process_set is None else process_set


def counted(bound: Bound, stage: tf.Tensor, x: Any, *after: tf.Operation) -> Any:
    """``x``, which when it is computed counts one reduction (and waits for ``after``)."""
    one = tf.one_hot(stage, bound.steps.shape[0], dtype=tf.int64)
    with tf.control_dependencies([bound.steps.assign_add(one), *after]):
        return tf.nest.map_structure(tf.identity, x, expand_composites=True)


def _allocate(name: str, length: int, dtype: str) -> tf.Variable:
    return tf.Variable(tf.zeros((length,), dtype), trainable=False, name=f"gradcomp_{name}")


def _names(variables: list[Any]) -> list[str]:
    """Names that are the same on every rank and unique: Keras paths, or TensorFlow names, whose
    repetitions (``Variable``) are numbered."""
    names, seen = [], Counter[str]()
    for variable in variables:
        name = str(getattr(variable, "path", None) or variable.name).removesuffix(":0")
        names.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names
