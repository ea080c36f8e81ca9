"""Stock ``hvd.DistributedOptimizer`` around tf_keras optimizers, with ``fit``."""

import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hvd_gradcomp.tensorflow as gradcomp

ROWS, BATCH, EPOCHS = 256, 32, 3


def data(rank):
    random = np.random.RandomState(100 + rank)
    x = random.standard_normal((ROWS, 32)).astype("float32")
    return x, (x @ np.random.RandomState(5).standard_normal((32, 10))).argmax(1)


def fit(hvd, spec, run_eagerly=False, **options):
    tf_keras.backend.clear_session()  # so that names begin anew
    tf_keras.utils.set_random_seed(0)
    model = tf_keras.Sequential([tf_keras.layers.Dense(64, activation="relu"), tf_keras.layers.Dense(10)])
    model.build((None, 32))
    compression = gradcomp.Compression(spec, variables=model.trainable_variables, min_size=256)
    optimizer = hvd_keras.DistributedOptimizer(tf_keras.optimizers.SGD(0.3), compression=compression, **options)
    model.compile(optimizer, tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=run_eagerly)
    x, y = data(hvd.rank())
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False)
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    everyone = hvd.allgather_object(weights)
    assert all(everyone[0].tobytes() == other.tobytes() for other in everyone), "the ranks' weights differ"
    assert np.isfinite(weights).all()
    losses = history.history["loss"]
    return weights, losses, compression.stats()


@pytest.mark.parametrize("spec", ["uniform(bits=4)", "topk(ratio=0.05)", "fp16"])
def test_fit(hvd, spec):
    weights, losses, stats = fit(hvd, spec)
    assert losses[-1] < 0.7 * losses[0]
    assert stats["steps"] == EPOCHS * ROWS // BATCH
    assert stats["tensors"]["dense/kernel"]["codec"].startswith(spec.partition("(")[0])
    dense, _, _ = fit(hvd, "none")
    assert not np.array_equal(weights, dense), "a lossy codec must leave a trace"


def test_fit_eagerly(hvd):
    traced, _, _ = fit(hvd, "uniform(bits=4)")
    eager, _, stats = fit(hvd, "uniform(bits=4)", run_eagerly=True)
    np.testing.assert_allclose(eager, traced, rtol=1e-3, atol=1e-4)
    assert stats["steps"] == EPOCHS * ROWS // BATCH


@pytest.mark.parametrize("average", [True, False])
def test_backward_passes_per_step(hvd, average):
    """Case J3: one exchange for every second batch, and the meaning of uncompressed Horovod."""
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
    weights, losses, stats = fit(hvd, "uniform(bits=12)", **options)
    assert losses[-1] < losses[0]
    assert stats["steps"] == EPOCHS * ROWS // BATCH // 2
    dense, _, _ = fit(hvd, "none", **options)
    every, _, _ = fit(hvd, "none")
    assert np.abs(weights - dense).max() < 0.5 * np.abs(weights - every).max(), "nearer to one pass a step than to two"


def test_sum(hvd):
    weights, _, _ = fit(hvd, "uniform(bits=12)", op=hvd.Sum)
    dense, _, _ = fit(hvd, "none", op=hvd.Sum)
    np.testing.assert_allclose(weights, dense, atol=0.05)


def test_our_tape_takes_tf_keras_variables(hvd):
    model = tf_keras.Sequential([tf_keras.layers.Dense(16)])
    model.build((None, 8))
    compression = gradcomp.Compression("sign", variables=model.trainable_variables, min_size=0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((4, 8)))) * float(hvd.rank())
    grads = gradcomp.DistributedGradientTape(tape, compression=compression).gradient(loss, model.trainable_variables)
    np.testing.assert_allclose(grads[0], np.full((8, 16), 4.0 * (hvd.size() - 1) / 2), rtol=1e-6)
