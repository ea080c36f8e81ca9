"""Callbacks for ``fit`` on several ranks: Horovod's own do not work with Keras 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_gradcomp.collectives.hvd_tensorflow import hvd
from hvd_gradcomp.tensorflow.engine import global_set, unwrap


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the model's and the optimizer's variables of ``root_rank``.

    Once: before the first batch, or after it if the model is built only then. Residuals are no
    variables of the optimizer: they differ by rank and stay as they are.

    Args:
        root_rank: global rank whose values all get.
        process_set: the ranks that take part; all by default.
    """

    def __init__(self, root_rank: int = 0, process_set: Any = None) -> None:
        super().__init__()
        self.root_rank, self.process_set = root_rank, global_set(process_set)
        self._done = False

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast if there is something to broadcast."""
        if self.model.built:
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast what the first batch built."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self._done:
            variables = [unwrap(v) for v in (*self.model.variables, *self.model.optimizer.variables)]
            hvd.broadcast_variables(variables, root_rank=self.root_rank, process_set=self.process_set)
            self._done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces every metric of an epoch by its mean over the ranks.

    List it before callbacks that act on metrics (early stopping, checkpoints, logs), so that these
    see the mean, and decide alike on every rank. The progress bar shows this rank's own until the
    epoch ends.

    Args:
        process_set: the ranks that take part; all by default.
    """

    def __init__(self, process_set: Any = None) -> None:
        super().__init__()
        self.process_set = global_set(process_set)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average ``logs`` in place."""
        if not logs:
            return
        names = sorted(logs)
        mine = tf.constant(np.array([logs[name] for name in names], np.float64))
        mean = hvd.allreduce(mine, op=hvd.Average, name="gradcomp.metrics", process_set=self.process_set)
        logs.update(zip(names, np.asarray(mean).tolist(), strict=True))
