"""``fit`` with ``gradcomp.DistributedOptimizer``: the ranks see different data and must end with equal weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_gradcomp.keras as gradcomp
from hvd_gradcomp.errors import UsageError

from .world import STEPS, fit, joint, network, ranks_differ, weights


def wrapped(base=None, spec="none", **options):
    return gradcomp.DistributedOptimizer(base or keras.optimizers.SGD(0.1), compression=spec, min_size=256, **options)


def test_a_plain_optimizer_lets_the_ranks_drift_apart(hvd):
    """The fault itself: what the next tests compare is able to differ."""
    model = network(keras.optimizers.SGD(0.1))
    fit(model)
    assert ranks_differ(model)


@pytest.mark.parametrize("spec", ["none", "uniform(bits=4)", "topk(ratio=0.05) + uniform(bits=8)", "powersgd(rank=2)"])
def test_ranks_end_equal_and_learn(hvd, spec):
    optimizer = wrapped(spec=spec)
    model = network(optimizer)
    losses = fit(model)
    assert not ranks_differ(model), "the gradients were not reduced"
    assert losses[-1] < losses[0]
    stats = optimizer.compression.stats()
    assert stats["steps"] == STEPS
    assert (stats["ratio"] > 2) == (spec != "none")


@pytest.mark.parametrize("make", [
    lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), lambda: keras.optimizers.Adam(0.01),
    lambda: keras.optimizers.SGD(0.1, clipnorm=0.1), lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    lambda: keras.optimizers.SGD(0.1, clipvalue=0.01), lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5)),
    lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    lambda: keras.optimizers.SGD(0.1, loss_scale_factor=1024.0)],
    ids=["nesterov", "adam", "clipnorm", "global_clipnorm", "clipvalue", "adamw", "schedule", "ema", "loss scale"])
def test_uncompressed_equals_one_process_on_the_joint_batches(hvd, make):
    """Case J7 among others: what acts on gradients acts on the reduced ones."""
    model = network(wrapped(make()))
    fit(model)
    assert not ranks_differ(model)
    np.testing.assert_allclose(weights(model), joint(make()), atol=2e-4)


def test_eagerly(hvd):
    model = network(wrapped(spec="uniform(bits=4)"), run_eagerly=True)
    fit(model, epochs=1)
    traced = network(wrapped(spec="uniform(bits=4)"))
    fit(traced, epochs=1)
    assert not ranks_differ(model)
    np.testing.assert_allclose(weights(model), weights(traced), atol=1e-3)


def test_custom_loop(hvd):
    """``apply_gradients`` in one trace, which builds the optimizer."""
    optimizer = wrapped(spec="sign")
    model = network(optimizer)
    traces = []

    @tf.function
    def train_step(x):
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                                      strict=True))

    for number in range(3):
        train_step(tf.ones((4, 32)) * float(number + hvd.rank()))
    assert not ranks_differ(model)
    assert len(traces) == 2, "one that creates variables, as tf.function does, and one for all steps"
    assert int(optimizer.iterations) == 3 == optimizer.compression.stats()["steps"]


@pytest.mark.parametrize("average", [True, False])
def test_backward_passes_per_step(hvd, average):
    """Case J3: one exchange for every second batch; their gradients are added, or averaged."""
    optimizer = wrapped(backward_passes_per_step=2, average_aggregated_gradients=average)
    model = network(optimizer)
    fit(model)
    assert not ranks_differ(model)
    assert optimizer.compression.stats()["steps"] == STEPS // 2
    assert int(optimizer.iterations) == STEPS, "schedules count batches, as Horovod's and Keras's accumulation do"
    rate = 0.1 if average else 0.2  # plain SGD on a sum of two means is SGD on their mean with twice the rate
    want = joint(keras.optimizers.SGD(rate, gradient_accumulation_steps=2))
    np.testing.assert_allclose(weights(model), want, atol=2e-4)


def test_xla_is_refused_with_the_reason(hvd):
    model = network(wrapped(), jit_compile=True)
    with pytest.raises(UsageError, match="jit_compile=False"):
        fit(model)


def test_callbacks(hvd):
    """Different first weights become rank 0's; metrics become their mean over the ranks."""
    model = network(wrapped())
    for v in model.trainable_variables:
        v.assign(v + 0.01 * float(hvd.rank()))
    assert ranks_differ(model)
    own, seen = [], {}

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            own.append(dict(logs))

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.update(logs)

    fit(model, epochs=1, callbacks=[gradcomp.BroadcastGlobalVariablesCallback(0), Own(),
                                    gradcomp.MetricAverageCallback(), Seen()])
    assert not ranks_differ(model)
    losses = [logs["loss"] for logs in hvd.allgather_object(own[0])]
    assert len(set(losses)) == hvd.size(), "the ranks' own losses must differ for this test to mean anything"
    assert seen["loss"] == pytest.approx(sum(losses) / hvd.size(), rel=1e-6)


def test_a_model_that_is_built_by_its_first_batch(hvd):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(10)])
    model.compile(wrapped(spec="sign"), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model, callbacks=[gradcomp.BroadcastGlobalVariablesCallback(0)])
    assert not ranks_differ(model)


def test_sum(hvd):
    model = network(wrapped(keras.optimizers.SGD(0.1 / hvd.size()), op=hvd.Sum))
    fit(model)
    np.testing.assert_allclose(weights(model), joint(keras.optimizers.SGD(0.1)), atol=2e-4)
