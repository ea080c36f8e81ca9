"""Train a small Keras 3 network on MNIST under Horovod, with compressed gradients, in a TensorFlow loop."""

from __future__ import annotations

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported

import common
import data
import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras import layers

import hvd_gradcomp.tensorflow as gradcomp


def network() -> keras.Sequential:
    """Two convolutions and two dense layers, 106,000 parameters."""
    return keras.Sequential([
        keras.Input((data.SIDE, data.SIDE, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(data.CLASSES)])


def tensors(digits: data.Digits) -> tuple[tf.Tensor, tf.Tensor]:
    """Images ``[n, 28, 28, 1]`` and labels ``[n]``."""
    return tf.constant(digits.images[..., None]), tf.constant(digits.labels)


def main() -> None:
    args = common.parser(__file__, __doc__).parse_args()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks share this machine's cores
    keras.utils.set_random_seed(args.seed)

    train, test = data.load()
    train = data.shard(train, hvd.rank(), hvd.size())
    model = network()
    optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    # Horovod takes TensorFlow's variables; Keras 3 keeps one inside each of its own.
    hvd.broadcast_variables([v.value for v in model.variables + optimizer.variables], root_rank=0)

    compression = gradcomp.Compression(args.compression, variables=model.trainable_variables,
                                       min_size=args.min_size, exchange=args.exchange)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # All that compression takes: this tape, which knows Keras 3 variables as well.
        tape = gradcomp.DistributedGradientTape(tape, compression=compression)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def evaluate() -> tuple[float, float]:
        """Loss and accuracy on the test digits."""
        images, labels = tensors(test)
        outputs = model(images, training=False)
        right = tf.cast(tf.argmax(outputs, 1) == labels, "float32")
        return float(loss_of(labels, outputs)), float(tf.reduce_mean(right))

    result = common.Result.start("TensorFlow", args, hvd.size(), model.count_params())
    steps = data.steps_per_epoch(train, args.batch_size)
    seconds = 0.0
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        optimizer.learning_rate = common.learning_rate(args, epoch)
        order = data.batches(train, args.batch_size, args.seed, epoch)
        for batch in common.progress(order, steps, epoch, args.epochs, hvd.rank()):
            train_step(*tensors(batch))
        seconds += time.perf_counter() - begin
        if hvd.rank() == 0:  # all ranks have the same weights
            result.epoch_done(*evaluate(), compression.stats())
    if hvd.rank() == 0:
        result.finish(seconds, args.json)


if __name__ == "__main__":
    main()
