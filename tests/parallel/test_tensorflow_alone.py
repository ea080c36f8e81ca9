"""TensorFlow programs that never compress: they must say so, or have no reason to."""

import sys

import pytest

from .launch import horovodrun

STOCK_KERAS3 = """
import horovod.tensorflow.keras as hvd, keras, numpy as np
import hvd_gradcomp.tensorflow as gradcomp
hvd.init()
model = keras.Sequential([keras.layers.Dense(3)])
model.build((None, 4))
compression = gradcomp.Compression("sign", variables=model.trainable_variables)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression), "mse")
model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
"""

ONE_RANK = """
import horovod.tensorflow as hvd, numpy as np, tensorflow as tf
import hvd_gradcomp.tensorflow as gradcomp
hvd.init()
v = tf.Variable(tf.zeros(100))
compression = gradcomp.Compression("sign", variables=[v], min_size=0)
for wrap in (hvd.DistributedGradientTape, gradcomp.DistributedGradientTape):
    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * tf.range(100.0))
        return wrap(tape, compression=compression).gradient(loss, [v])[0]
    for run in (gradient, tf.function(gradient)):
        assert np.array_equal(run(), np.arange(100.0)), "one rank keeps its own gradient, uncompressed"
assert compression.stats()["steps"] == 0
"""


@pytest.mark.np2
def test_an_optimizer_that_reduces_nothing_is_reported() -> None:
    """Stock Horovod accepts a Keras 3 optimizer and never reduces a gradient."""
    run = horovodrun(2, "gloo", [sys.executable, "-c", STOCK_KERAS3], timeout=120)
    assert run.returncode == 0, run.stdout[-3000:]
    assert run.stdout.count("Compression(sign(block=1024)) was never called") == 2, run.stdout[-3000:]


@pytest.mark.np1
def test_one_rank_exchanges_nothing() -> None:
    run = horovodrun(1, "gloo", [sys.executable, "-c", ONE_RANK], timeout=120)
    assert run.returncode == 0, run.stdout[-3000:]
    assert "never called" not in run.stdout
