"""``DistributedOptimizer`` for Keras 3: the optimizer that was given, reducing gradients before it uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvd_gradcomp.codecs.base import Codec, is_int
from hvd_gradcomp.collectives.hvd_tensorflow import hvd
from hvd_gradcomp.errors import SpecError, UsageError
from hvd_gradcomp.keras.passes import Passes
from hvd_gradcomp.policy import DEFAULT_MIN_SIZE, Policy
from hvd_gradcomp.tensorflow.compression import Compression
from hvd_gradcomp.tensorflow.engine import as_written, global_set, unwrap
from hvd_gradcomp.tensorflow.step import Gradient, check_op

PACKAGE = "hvd_gradcomp"
_OPS = {"Average": hvd.Average, "Sum": hvd.Sum}


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`DistributedOptimizer` beside the optimizer."""

    compression: Any
    exchange: str
    min_size: int
    seed: int
    error_feedback: bool
    verify: bool
    op: str
    backward_passes_per_step: int
    average_aggregated_gradients: bool
    gradient_predivide_factor: float
    sparse_as_dense: bool
    ranks: tuple[int, ...] | None
    """Of the process set; None for all ranks."""


def DistributedOptimizer(
        optimizer: keras.optimizers.Optimizer, compression: Any = "none", *, exchange: str = "auto",
        min_size: int = DEFAULT_MIN_SIZE, seed: int = 0, error_feedback: bool = True, verify: bool = False,
        process_set: Any = None, op: Any = hvd.Average, backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False, gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False) -> Any:
    """A Keras 3 optimizer that reduces gradients over the ranks, compressed, before it applies them.

    ::

        optimizer = gradcomp.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="topk(ratio=0.01)")
        model.compile(optimizer, loss, jit_compile=False)

    Works in ``compile`` and ``fit`` and in custom loops (``apply``, ``apply_gradients``), eagerly and
    inside ``tf.function``. Its class is a subclass of the given optimizer's, and it shares that one's
    variables: use the result alone. Clipping, constraints, weight decay and averages of weights act on
    the reduced gradients, as without Horovod. With one rank it does what the given optimizer does.

    ``model.save`` and ``keras.models.load_model`` keep wrapper and codec if this module is imported;
    residuals are per rank and not in that file (``optimizer.compression.state_dict()``). Where this
    package is not installed, ``load_model(file, compile=False)`` gives the plain model.

    **float16:** around a ``LossScaleOptimizer``, or under the global policy ``mixed_float16``, the
    result is itself the loss-scaling optimizer: it reduces first and then looks whether gradients are
    finite, so all ranks skip a step together. The reverse nesting is refused.

    **XLA** cannot compile Horovod's collectives: ``jit_compile=True``, which ``"auto"`` means on a
    machine with a GPU, is refused when the step is traced on more than one rank.

    Args:
        optimizer: any Keras 3 optimizer.
        compression: whatever :class:`hvd_gradcomp.tensorflow.Compression` takes.
        exchange, min_size, seed, error_feedback, verify, process_set: see there.
        op: ``hvd.Average`` or ``hvd.Sum``.
        backward_passes_per_step: add up that many batches' gradients on each rank before reducing.
        average_aggregated_gradients: divide their sum by that number.
        gradient_predivide_factor: splits the division of ``op=Average``, as in Horovod.
        sparse_as_dense: reduce IndexedSlices as dense (and compressed) gradients.

    Returns:
        The optimizer; its attribute ``compression`` is the Compression, None until it is built.

    Raises:
        SpecError: a spec or option that cannot be.
        UsageError: ``optimizer`` is no Keras 3 optimizer, or wrapped already.
    """
    check_op(op, gradient_predivide_factor)
    return wrap(checked(optimizer), Distributed, compression, exchange=exchange, min_size=min_size, seed=seed,
                error_feedback=error_feedback, verify=verify, process_set=process_set, op=op,
                backward_passes_per_step=backward_passes_per_step,
                average_aggregated_gradients=average_aggregated_gradients,
                gradient_predivide_factor=gradient_predivide_factor, sparse_as_dense=sparse_as_dense)


def wrap(optimizer: Any, mixin: Any, compression: Any, *, exchange: str, min_size: int, seed: int, process_set: Any,
         backward_passes_per_step: int, average_aggregated_gradients: bool, sparse_as_dense: bool,
         error_feedback: bool = True, verify: bool = False, op: Any = hvd.Average,
         gradient_predivide_factor: float = 1.0) -> Any:
    """An object of a subclass of ``mixin`` and of the optimizer's class; see :func:`DistributedOptimizer`."""
    if not is_int(backward_passes_per_step, 1):
        raise SpecError(f"backward_passes_per_step must be a whole number from 1, not {backward_passes_per_step!r}")
    Policy.make(compression, min_size)  # a wrong spec is an error here, not in the first step
    if backward_passes_per_step > 1 and optimizer.gradient_accumulation_steps:
        raise SpecError("backward_passes_per_step and the optimizer's own gradient_accumulation_steps do the same: "
                        "give backward_passes_per_step alone, which exchanges less")
    ranks = None if global_set(process_set) is hvd.global_process_set else tuple(process_set.ranks)
    wrapped = seen_as(distributed_class(type(optimizer), mixin), optimizer)
    wrapped.process_set = global_set(process_set)
    wrapped.settings = Settings(
        compression, exchange, min_size, seed, error_feedback, verify,
        next(name for name, o in _OPS.items() if o == op),
        backward_passes_per_step, average_aggregated_gradients, gradient_predivide_factor, sparse_as_dense, ranks)
    if wrapped.built:
        wrapped.bind(wrapped._trainable_variables)
    return wrapped


class Distributed:
    """Comes before the wrapped optimizer's class among the bases of the result's class."""

    name_in_files = "DistributedOptimizer"
    settings: Settings
    process_set: Any
    compression: Compression | None = None
    _passes: Passes | None = None

    def build(self, variables: Sequence[Any]) -> None:
        """Create the optimizer's variables, and the Compression."""
        super().build(variables)  # type: ignore[misc]
        if self.compression is None:
            self.bind(variables)

    def bind(self, variables: Sequence[Any]) -> None:
        """Create the Compression of these variables."""
        settings = self.settings
        with tf.init_scope():  # the first step may be traced already
            self.compression = self._compression(variables)
            if settings.backward_passes_per_step > 1:
                self._passes = Passes([unwrap(v) for v in variables], settings.backward_passes_per_step,
                                      settings.average_aggregated_gradients)

    def _compression(self, variables: Sequence[Any]) -> Compression:
        settings = self.settings
        return Compression(settings.compression, variables, exchange=settings.exchange, min_size=settings.min_size,
                           process_set=self.process_set, seed=settings.seed, error_feedback=settings.error_feedback,
                           verify=settings.verify, loss_scale=self._scale())

    def _scale(self) -> Any:
        """What the gradients that come in are multiplied by."""
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            return lambda: self.dynamic_scale
        return self.__dict__["loss_scale_factor"]

    @as_written
    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce ``grads`` over the ranks, then update as the wrapped optimizer does.

        Raises:
            UsageError: the step is compiled by XLA, or a variable is not one that it was built with.
            DisagreementError: on every rank, if the ranks were configured differently.
        """
        grads = list(grads)
        if not grads:
            return
        built: Any = self
        variables = list(built._trainable_variables if trainable_variables is None else trainable_variables)
        if not built.built:
            self.build(variables)
        assert self.compression is not None
        if self.compression.engine.exchanges:
            _refuse_xla()
        if self._passes is None:
            self._reduce_and_apply(grads, variables)
        else:
            self._passes.add(grads, [unwrap(v) for v in variables],
                             lambda sums: self._reduce_and_apply(sums, variables),
                             lambda: built.iterations.assign_add(1))

    def _reduce_and_apply(self, grads: list[Gradient], variables: list[Any]) -> None:
        super().apply(self._reduce(grads, variables), variables)  # type: ignore[misc]

    def _reduce(self, grads: list[Gradient], variables: list[Any]) -> list[Gradient]:
        assert self.compression is not None
        settings = self.settings
        return self.compression.step(
            grads, [unwrap(v) for v in variables], op=_OPS[settings.op],
            predivide=settings.gradient_predivide_factor, sparse_as_dense=settings.sparse_as_dense)

    def __setattr__(self, name: str, value: Any) -> None:
        # The only sign that Keras gives when it puts a LossScaleOptimizer around an optimizer.
        if name == "loss_scale_factor" and value is None:
            raise UsageError(
                "a LossScaleOptimizer around this optimizer (Keras adds one under the policy mixed_float16) would "
                "decide on each rank's own gradients whether to skip a step, and the other ranks would wait for ever. "
                "Wrap the other way round, DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...), "
                "which then is the loss-scaling optimizer itself")
        super().__setattr__(name, value)

    def get_config(self) -> dict[str, Any]:
        """The wrapped optimizer, serialized, and the arguments of the wrapper."""
        settings = asdict(self.settings) | {"compression": portable(self.settings.compression)}
        return {"optimizer": keras.saving.serialize_keras_object(self.plain()), **settings}

    def plain(self) -> Any:
        """The given optimizer, with this one's state."""
        return seen_as(type(self).__bases__[1], self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Any:
        """The way back. Raises UsageError for a process set, which only the running job can have."""
        optimizer, arguments = restored(config, custom_objects)
        return DistributedOptimizer(optimizer, **arguments)


# Keras finds the class by this name when it loads a model, whichever optimizer was wrapped.
keras.saving.register_keras_serializable(PACKAGE, Distributed.name_in_files)(Distributed)


def distributed_class(base: type, mixin: type) -> Any:
    """A subclass of ``mixin`` and of an optimizer's class."""
    cls = type(base.__name__, (mixin, base), {"__doc__": base.__doc__, "__module__": mixin.__module__})
    return keras.saving.register_keras_serializable(PACKAGE, mixin.name_in_files)(cls)  # type: ignore[attr-defined]


def seen_as(cls: Any, optimizer: Any) -> Any:
    """An object of another class with the same attributes, so the same variables."""
    other = object.__new__(cls)
    other.__dict__.update(optimizer.__dict__)
    return other


def restored(config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """The optimizer and the arguments in the result of ``get_config``."""
    arguments = dict(config)
    optimizer = keras.saving.deserialize_keras_object(arguments.pop("optimizer"), custom_objects=custom_objects)
    if arguments.pop("ranks") is not None:
        raise UsageError(f"this optimizer was saved with a process set of the ranks {config['ranks']}, which only a "
                         "running job can make: load_model(file, compile=False), then compile it again")
    if "op" in arguments:
        arguments["op"] = _OPS[arguments["op"]]
    if "compression" in arguments:
        arguments["compression"] = from_portable(arguments["compression"])
    return optimizer, arguments


def portable(compression: Any) -> Any:
    """What users pass as ``compression`` in a form that JSON keeps: codecs as spec strings, stages as pairs."""
    if isinstance(compression, Codec):
        return str(compression)
    if isinstance(compression, Mapping):
        if all(isinstance(key, str) for key in compression):
            return {key: portable(value) for key, value in compression.items()}
        return [[begin, portable(codec)] for begin, codec in compression.items()]
    if isinstance(compression, list):
        return [portable(each) for each in compression]
    return compression


def from_portable(saved: Any) -> Any:
    """The way back from :func:`portable`."""
    if isinstance(saved, Mapping):
        return {key: from_portable(value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        if all(isinstance(each, (list, tuple)) for each in saved):
            return {begin: from_portable(codec) for begin, codec in saved}
        return [from_portable(each) for each in saved]
    return saved


def checked(optimizer: Any) -> Any:
    """The optimizer to wrap; under a float16 policy a loss-scaling one. Raises UsageError."""
    if isinstance(optimizer, Distributed):
        raise UsageError("this optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(f"optimizer must be a Keras 3 optimizer such as keras.optimizers.SGD(0.1), not {optimizer!r}; "
                         "for tf_keras pass compression= to horovod.tensorflow.keras.DistributedOptimizer")
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaling and isinstance(optimizer.inner_optimizer, Distributed):
        raise UsageError("the optimizer inside this LossScaleOptimizer is a DistributedOptimizer already")
    if keras.config.dtype_policy().name == "mixed_float16" and not scaling:
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _refuse_xla() -> None:
    graph = tf.compat.v1.get_default_graph()
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph):
        raise UsageError("XLA cannot compile Horovod's collectives: pass jit_compile=False to model.compile (its "
                         "default \"auto\" means True on a machine with a GPU) or to tf.function")
