"""Gradients of several batches added up on this rank, so that only every n-th batch is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_gradcomp.tensorflow.step import Gradient


class Passes:
    """Sums over ``per_step`` backward passes, as ``backward_passes_per_step`` of Horovod's optimizers.

    The sums are this rank's own: they are no optimizer variables, which would be saved and broadcast.

    Args:
        variables: the ``tf.Variable`` whose gradients are added up.
        average: divide the sums by ``per_step``.
    """

    def __init__(self, variables: Sequence[tf.Variable], per_step: int, average: bool) -> None:
        self._per_step, self._average = per_step, average
        self._done = tf.Variable(0, dtype=tf.int64, trainable=False, name="gradcomp_passes")
        self._sums = {variable.ref(): tf.Variable(tf.zeros_like(variable), trainable=False, name="gradcomp_sum")
                      for variable in variables}

    def add(self, grads: Sequence[Gradient], variables: Sequence[tf.Variable],
            step: Callable[[list[Gradient]], None], otherwise: Callable[[], Any]) -> None:
        """Add one pass. Every ``per_step``-th time ``step`` gets the sums, else ``otherwise`` is called.

        A gradient that is None stays None; IndexedSlices become dense.
        """
        sums = [None if grad is None else self._sums[variable.ref()]
                for grad, variable in zip(grads, variables, strict=True)]
        for total, grad in zip(sums, grads, strict=True):
            if total is not None:
                total.assign_add(tf.convert_to_tensor(grad))
        done = self._done.assign_add(1)

        def last() -> tf.Tensor:
            divisor = self._per_step if self._average else 1
            step([None if total is None else total / tf.cast(divisor, total.dtype) for total in sums])
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            return self._done.assign(0)

        def not_yet() -> tf.Tensor:
            otherwise()
            return tf.identity(self._done)

        tf.cond(tf.equal(done, self._per_step), last, not_yet)
