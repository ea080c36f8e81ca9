"""Train a small Keras 3 network on MNIST under Horovod with ``compile`` and ``fit``, and compressed gradients."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported

import common
import data
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tensorflow2_mnist import network

import hvd_gradcomp.keras as gradcomp


def start(seed: int) -> None:
    """Once per process, before anything else."""
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks share this machine's cores
    keras.utils.set_random_seed(seed)


def train(args: argparse.Namespace, optimizer: Any, digits: data.Digits, test: data.Digits) -> None:
    """``compile`` and ``fit`` with a wrapped optimizer; rank 0 prints the table."""
    model = network()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
                  jit_compile=False)  # XLA cannot compile Horovod's collectives
    result = common.Result.start("Keras", args, hvd.size(), model.count_params())
    images, labels = digits.images[..., None], digits.labels
    whole = data.steps_per_epoch(digits, args.batch_size) * args.batch_size  # the same number of steps on every rank

    class Report(keras.callbacks.Callback):  # type: ignore[misc]
        """Notes accuracy and bytes after every epoch."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if hvd.rank() == 0:  # all ranks have the same weights
                loss, accuracy = model.evaluate(test.images[..., None], test.labels, verbose=0)
                result.epoch_done(loss, accuracy, optimizer.compression.stats())

    begin = time.perf_counter()
    order = np.random.default_rng(args.seed).permutation(len(labels))[:whole]
    model.fit(images[order], labels[order], batch_size=args.batch_size, epochs=args.epochs,
              verbose=2 if hvd.rank() == 0 else 0,
              callbacks=[gradcomp.BroadcastGlobalVariablesCallback(0), gradcomp.MetricAverageCallback(),
                         keras.callbacks.LearningRateScheduler(lambda epoch: common.learning_rate(args, epoch)),
                         Report()])
    if hvd.rank() == 0:
        result.finish(time.perf_counter() - begin, args.json)


def main() -> None:
    args = common.parser(__file__, __doc__).parse_args()
    start(args.seed)
    digits, test = data.load()
    # All that compression takes: this wrapper.
    optimizer = gradcomp.DistributedOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9), args.compression,
                                              min_size=args.min_size, exchange=args.exchange)
    train(args, optimizer, data.shard(digits, hvd.rank(), hvd.size()), test)


if __name__ == "__main__":
    main()
