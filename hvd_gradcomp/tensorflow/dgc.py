"""``DGCOptimizer``: Deep Gradient Compression with the settings of a Keras SGD, for custom training loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.codecs.base import Codec, is_number
from hvd_gradcomp.errors import SpecError, UsageError
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.policy import DEFAULT_MIN_SIZE
from hvd_gradcomp.schedule import dgc
from hvd_gradcomp.tensorflow.compression import Compression
from hvd_gradcomp.tensorflow.engine import as_written, unwrap
from hvd_gradcomp.tensorflow.step import Gradient


class DGCOptimizer:
    """Reduces gradients by Deep Gradient Compression and applies them as ``torch.optim.SGD`` would.

    ::

        optimizer = gradcomp.DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), model.trainable_variables,
                                          ratio=0.001, warmup_steps=4 * epoch)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    The given SGD lends its learning rate (schedules too), momentum, Nesterov and weight decay, and counts
    iterations; all variables are updated here. As in torch, weight decay is part of the gradient and the
    velocity does not contain the learning rate, so the numbers are those of
    :func:`hvd_gradcomp.torch.DGCOptimizer`. Create it once, outside of any ``tf.function``; works eagerly
    and inside one. One rank alone does the same with a world of one. For ``fit`` take
    :func:`hvd_gradcomp.keras.DGCOptimizer`.

    Args:
        optimizer: an SGD of Keras 3 or tf_keras.
        variables: the trainable variables.
        ratio, warmup_steps, warmup_schedule, begin_step, clip_norm, value_codec, threshold: see
            :func:`hvd_gradcomp.torch.DGCOptimizer`.
        exchange, min_size, loss_scale, seed, verify, process_set: see :class:`Compression`. Gradients come
            multiplied by ``loss_scale``, and are divided by it here.
        sparse_as_dense: reduce IndexedSlices as dense (and compressed) gradients.

    Raises:
        UsageError: the optimizer is no SGD, or clips, or accumulates.
        SpecError: a setting that cannot be.
    """

    def __init__(self, optimizer: Any, variables: Iterable[Any], ratio: float = 0.001, warmup_steps: int = 400,
                 warmup_schedule: Sequence[float] | None = None, begin_step: int = 0, clip_norm: float | None = None,
                 value_codec: str | Codec | None = None, exchange: str = "auto", *, threshold: str = "exact",
                 min_size: int = DEFAULT_MIN_SIZE, loss_scale: Any = None, seed: int = 0, verify: bool = False,
                 process_set: Any = None, sparse_as_dense: bool = False) -> None:
        check_sgd(optimizer, clip_norm)
        self.optimizer, self._sparse_as_dense = optimizer, sparse_as_dense
        listed = list(variables)
        self.compression = Compression(
            dgc(ratio, warmup_steps=warmup_steps, warmup_schedule=warmup_schedule, begin_step=begin_step,
                value_codec=value_codec, threshold=threshold),
            listed, exchange=exchange, min_size=min_size, process_set=process_set, loss_scale=loss_scale, seed=seed,
            verify=verify, sgd=lambda variable: momentum_of(optimizer, variable, clip_norm))
        self._velocities = {bound.variable.ref(): tf.Variable(tf.zeros_like(bound.variable), trainable=False)
                            for bound in self.compression.engine.bounds if bound.slot.codec is None}

    @property
    def variables(self) -> list[tf.Variable]:
        """What is the same on every rank, for checkpoints and elastic states: velocities of the small variables, and
        the number of steps. What differs by rank is the ``compression``'s."""
        return [*self._velocities.values(), unwrap(self.optimizer.iterations)]

    @as_written
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Any]]) -> None:
        """Reduce this rank's gradients and update the variables. A gradient that is None on all ranks
        leaves its variable alone."""
        pairs = list(grads_and_vars)
        variables = [unwrap(variable) for _, variable in pairs]
        reduced = self.compression.step([grad for grad, _ in pairs], variables, sparse_as_dense=self._sparse_as_dense)
        scale = self.compression.engine.scale()
        for grad, variable in zip(reduced, variables, strict=True):
            if grad is not None:
                grad = tf.convert_to_tensor(grad)
                self._update(grad if scale is None else grad / tf.cast(scale, grad.dtype), variable)
        self.optimizer.iterations.assign_add(1)

    def _update(self, grad: tf.Tensor, variable: tf.Variable) -> None:
        rate = tf.cast(tf.convert_to_tensor(unwrap(self.optimizer.learning_rate)), variable.dtype)
        velocity = self._velocities.get(variable.ref())
        if velocity is not None:  # of a compressed variable the gradient is the update already
            sgd = momentum_of(self.optimizer, variable, None)
            grad = grad + sgd.weight_decay * variable
            velocity.assign(sgd.momentum * velocity + grad)
            grad = grad + sgd.momentum * velocity if sgd.nesterov else tf.convert_to_tensor(velocity)
        variable.assign_sub(rate * grad)


def momentum_of(optimizer: Any, variable: tf.Variable, clip_norm: float | None) -> Momentum:
    """What a Keras SGD says about a variable at the moment."""
    decay = float(optimizer.weight_decay or 0.0) if optimizer._use_weight_decay(variable) else 0.0
    weights = tf.cast(tf.reshape(variable, (-1,)), tf.float32) if decay else None
    return Momentum(float(optimizer.momentum), bool(optimizer.nesterov), decay, weights, clip_norm)


def check_sgd(optimizer: Any, clip_norm: float | None) -> None:
    """Raise UsageError unless DGC can do what this optimizer does; SpecError for a wrong ``clip_norm``."""
    # by name: it may come from Keras 3 or from tf_keras
    if not any(cls.__name__ == "SGD" for cls in type(optimizer).__mro__):
        raise UsageError(f"DGC corrects the momentum of SGD, not of {type(optimizer).__name__}: use hvd_gradcomp.keras."
                         "DistributedOptimizer(optimizer, \"topk(ratio=0.001)\"), whose error feedback works with any "
                         "optimizer")
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        if getattr(optimizer, name, None) is not None:
            raise UsageError(f"{name} of the SGD would clip updates that hold momentum already: use clip_norm= of "
                             "DGCOptimizer, which clips each rank's gradient")
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise UsageError("gradient_accumulation_steps of the SGD would add up updates that hold momentum already: use "
                         "backward_passes_per_step= of hvd_gradcomp.keras.DGCOptimizer")
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise SpecError(f"clip_norm must be above 0, or None, not {clip_norm!r}")
