"""``DGCOptimizer`` for Keras 3: Deep Gradient Compression in ``compile`` and ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.keras.optimizer import PACKAGE, Distributed, checked, portable, restored, seen_as, wrap
from hvd_gradcomp.policy import DEFAULT_MIN_SIZE
from hvd_gradcomp.schedule import dgc
from hvd_gradcomp.tensorflow.compression import Compression
from hvd_gradcomp.tensorflow.dgc import check_sgd, momentum_of
from hvd_gradcomp.tensorflow.step import Gradient


def DGCOptimizer(
        optimizer: keras.optimizers.SGD, ratio: float = 0.001, warmup_steps: int = 400,
        warmup_schedule: Sequence[float] | None = None, begin_step: int = 0, clip_norm: float | None = None,
        value_codec: str | Codec | None = None, exchange: str = "auto", *, threshold: str = "exact",
        min_size: int = DEFAULT_MIN_SIZE, seed: int = 0, verify: bool = False, process_set: Any = None,
        backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
        sparse_as_dense: bool = False) -> Any:
    """A Keras 3 SGD whose large gradients go by Deep Gradient Compression.

    ::

        optimizer = gradcomp.DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), ratio=0.001, warmup_steps=4 * epoch)
        model.compile(optimizer, loss, jit_compile=False)

    What :func:`DistributedOptimizer` says holds here too, also about float16. Learning rate, momentum,
    Nesterov and weight decay are the SGD's; the numbers are those of
    :func:`hvd_gradcomp.torch.DGCOptimizer`: weight decay is part of the gradient, as torch's, and not a
    factor on the weights beside it, as Keras's, and the velocity of a compressed variable does not
    contain the learning rate. Small variables are updated by the SGD itself.

    Args:
        ratio, warmup_steps, warmup_schedule, begin_step, clip_norm, value_codec, threshold: see
            :func:`hvd_gradcomp.torch.DGCOptimizer`.
        exchange, min_size, seed, verify, process_set, backward_passes_per_step, average_aggregated_gradients,
            sparse_as_dense: see :func:`DistributedOptimizer`.

    Raises:
        UsageError: the optimizer is no Keras 3 SGD, nor a LossScaleOptimizer around one, or it clips or
            accumulates.
        SpecError: a setting that cannot be.
    """
    optimizer = checked(optimizer)
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    check_sgd(optimizer.inner_optimizer if scaling else optimizer, clip_norm)
    stages = dgc(ratio, warmup_steps=warmup_steps, warmup_schedule=warmup_schedule, begin_step=begin_step,
                 value_codec=value_codec, threshold=threshold)
    if scaling:
        optimizer = seen_as(type(optimizer), optimizer)
        optimizer.inner_optimizer = _with_sent_updates(optimizer.inner_optimizer)
    else:
        optimizer = _with_sent_updates(optimizer)
    wrapped = wrap(optimizer, DGC, stages, exchange=exchange, min_size=min_size, seed=seed, verify=verify,
                   process_set=process_set, backward_passes_per_step=backward_passes_per_step,
                   average_aggregated_gradients=average_aggregated_gradients, sparse_as_dense=sparse_as_dense)
    wrapped.sgd().is_compressed = wrapped.is_compressed
    wrapped.arguments = {
        "ratio": ratio, "warmup_steps": warmup_steps,
        "warmup_schedule": None if warmup_schedule is None else list(warmup_schedule), "begin_step": begin_step,
        "clip_norm": clip_norm, "value_codec": portable(value_codec), "threshold": threshold}
    return wrapped


class SentUpdates:
    """Comes before the SGD's class: a compressed variable's gradient holds its momentum and weight
    decay already, so its update is the learning rate times that."""

    is_compressed: Callable[[tf.Variable], bool]

    def update_step(self, gradient: Gradient, variable: tf.Variable, learning_rate: Any) -> None:
        """Called by Keras for each variable, with its reduced gradient."""
        slices = isinstance(gradient, tf.IndexedSlices)
        if self.is_compressed(variable) and not slices:
            variable.assign_sub(tf.cast(gradient, variable.dtype) * tf.cast(learning_rate, variable.dtype))
            return
        decay = momentum_of(self, variable, None).weight_decay
        super().update_step(  # type: ignore[misc]
            gradient if slices or not decay else gradient + decay * variable, variable, learning_rate)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Nothing: it is in the gradients."""


def _with_sent_updates(sgd: Any) -> Any:
    return seen_as(type(type(sgd).__name__, (SentUpdates, type(sgd)), {}), sgd)


def _without_sent_updates(sgd: Any) -> Any:
    return seen_as(type(sgd).__bases__[1], sgd)


class DGC(Distributed):
    """A :class:`Distributed` whose Compression applies the momentum of the SGD in it."""

    name_in_files = "DGCOptimizer"
    arguments: dict[str, Any]

    def sgd(self) -> Any:  # no property: Keras would follow it when it loads a model, without end
        """The SGD: the optimizer itself, or the one inside a loss-scaling optimizer."""
        return self.__dict__.get("inner_optimizer", self)

    def is_compressed(self, variable: tf.Variable) -> bool:
        """Whether DGC reduces a variable's gradients."""
        assert self.compression is not None
        return self.compression.engine.bound(variable).slot.codec is not None

    def plain(self) -> Any:
        """The given optimizer, with this one's state."""
        optimizer = super().plain()
        if "inner_optimizer" not in optimizer.__dict__:
            return _without_sent_updates(optimizer)
        optimizer.__dict__["inner_optimizer"] = _without_sent_updates(self.sgd())
        return optimizer

    def _compression(self, variables: Sequence[Any]) -> Compression:
        settings = self.settings
        return Compression(settings.compression, variables, exchange=settings.exchange, min_size=settings.min_size,
                           process_set=self.process_set, seed=settings.seed, verify=settings.verify,
                           loss_scale=self._scale(),
                           sgd=lambda variable: momentum_of(self.sgd(), variable, self.arguments["clip_norm"]))

    def get_config(self) -> dict[str, Any]:
        """The wrapped SGD, serialized, and the arguments of :func:`DGCOptimizer`."""
        config = super().get_config()
        for name in ("compression", "error_feedback", "op", "gradient_predivide_factor"):
            del config[name]
        return {**config, **self.arguments}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Any:
        """The way back."""
        optimizer, arguments = restored(config, custom_objects)
        return DGCOptimizer(optimizer, **arguments)


keras.saving.register_keras_serializable(PACKAGE, DGC.name_in_files)(DGC)
