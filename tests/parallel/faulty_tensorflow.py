"""``faulty.py`` for TensorFlow: in the second step the last rank does what the first argument says.

Every rank that ends with an error writes its name and text into the folder of the second argument.
"""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow as gradcomp
from hvd_gradcomp.collectives import hvd_tensorflow

FAULT, FOLDER = sys.argv[1], Path(sys.argv[2])
VARIABLES = {name: tf.Variable(tf.random.stateless_normal((64, 64), (1, i)) / 8) for i, name in enumerate("ab")}
calls = 0


def fault(grad: np.ndarray) -> np.ndarray:
    """The identity, whose second call fails."""
    global calls
    calls += 1
    if calls == 2 and hvd.rank() == hvd.size() - 1:
        if FAULT == "raise":
            raise ZeroDivisionError("a mistake in the user's backward pass")
        if FAULT == "kill":
            time.sleep(1)  # as in faulty.py
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "hang":
            time.sleep(3600)
    return grad


@tf.custom_gradient
def faulty(x: tf.Tensor) -> tuple[tf.Tensor, object]:
    return tf.identity(x), lambda grad: tf.ensure_shape(tf.numpy_function(fault, [grad], tf.float32), x.shape)


def corrupt(allgather):
    """What this rank sends is changed on its way."""
    def changed(x, *args):
        return allgather(tf.bitwise.bitwise_xor(x, tf.one_hot([5], x.shape[0], 4, 0, dtype=tf.uint8)[0]), *args)

    return changed


def main() -> None:
    hvd.init()
    if FAULT == "corrupt" and hvd.rank() == hvd.size() - 1:
        hvd_tensorflow.allgather = corrupt(hvd_tensorflow.allgather)
    compression = gradcomp.Compression("uniform(bits=8)", VARIABLES.values(), min_size=0, exchange="gather",
                                       verify=FAULT == "corrupt")

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            # the exchange of b's gradient is under way when a's is computed
            loss = tf.reduce_mean((faulty(x @ VARIABLES["a"]) @ VARIABLES["b"]) ** 2)
        tape = gradcomp.DistributedGradientTape(tape, compression=compression)
        for grad, variable in zip(tape.gradient(loss, list(VARIABLES.values())), VARIABLES.values(), strict=True):
            variable.assign_sub(0.1 * grad)

    for number in range(4):
        step(tf.random.stateless_normal((16, 64), (number, hvd.rank())))


if __name__ == "__main__":
    faulthandler.register(signal.SIGTERM)  # as in faulty.py
    try:
        main()
    except Exception as error:
        (FOLDER / f"rank{hvd.rank()}").write_text(f"{type(error).__name__}: {error}")
        raise
