"""The wrapped optimizer: its class and state, saved models, loss scaling, and what is refused."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_gradcomp.keras as gradcomp
from hvd_gradcomp.errors import DisagreementError, SpecError, UsageError

from .world import fit, network, ranks_differ, step, weights


@pytest.fixture
def folder(hvd, tmp_path):
    """One folder for all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path), root_rank=0))


@pytest.fixture
def float16():
    """The global policy ``mixed_float16`` during one test."""
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def wrapped(base=None, spec="topk(ratio=0.1)", **options):
    return gradcomp.DistributedOptimizer(base or keras.optimizers.SGD(0.1), spec, **{"min_size": 256, **options})


def test_it_is_a_subclass_that_shares_the_optimizers_state(hvd):
    base = keras.optimizers.SGD(0.1, momentum=0.9)
    model = network(base)
    fit(model, epochs=1)
    optimizer = wrapped(base)
    assert isinstance(optimizer, keras.optimizers.SGD) and type(base) is keras.optimizers.SGD
    assert all(one is other for one, other in zip(optimizer.variables, base.variables, strict=True))
    assert optimizer.compression is not None, "built already, so is the Compression"
    optimizer.learning_rate = 0.01
    assert float(base.learning_rate) == pytest.approx(0.01)


@pytest.mark.parametrize("spec", ["topk(ratio=0.1)", {0: "none", 3: "sign"},
                                  {"rules": [{"name": "*bias", "codec": "none"}], "default": "fp16"}])
def test_a_saved_model_comes_back_wrapped(hvd, folder, spec):
    """Case K3: same wrapper, same codec, and the ranks stay together."""
    model = network(wrapped(keras.optimizers.SGD(0.1, momentum=0.9), spec, seed=3))
    fit(model, epochs=1)
    if hvd.rank() == 0:
        model.save(folder / "model.keras")
    hvd.allreduce(tf.ones(1), name="saved")
    loaded = keras.models.load_model(folder / "model.keras")
    plain = keras.models.load_model(folder / "model.keras", compile=False)
    assert np.array_equal(weights(loaded), weights(model)) and np.array_equal(weights(plain), weights(model))
    assert isinstance(loaded.optimizer, keras.optimizers.SGD)
    assert loaded.optimizer.settings == model.optimizer.settings
    assert str(loaded.optimizer.compression.engine.plan.policy) == str(model.optimizer.compression.engine.plan.policy)
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        assert np.array_equal(one.numpy(), other.numpy())
    fit(loaded, epochs=1)
    assert not ranks_differ(loaded)
    assert not np.array_equal(weights(loaded), weights(plain))


def test_loss_scaling_decides_on_reduced_gradients(hvd):
    """Case L2: true gradient 1.0 at scale 1024 is applied as 1.0; an inf on one rank halves the scale once, on all."""
    optimizer = wrapped(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1024.0),
                        "uniform(bits=8)", min_size=0)
    variable = keras.Variable(np.zeros(40, np.float32))
    step(optimizer, [np.full(40, 1024.0)], [variable])
    np.testing.assert_allclose(variable.numpy(), -np.ones(40))
    before = optimizer.compression.state_dict()["tensors"]
    bad = np.full(40, 1024.0)
    bad[3] = np.inf if hvd.rank() == 0 else 1024.0
    step(optimizer, [bad], [variable])
    np.testing.assert_allclose(variable.numpy(), -np.ones(40))
    assert float(optimizer.dynamic_scale) == 512.0
    after = optimizer.compression.state_dict()["tensors"]
    assert all(np.array_equal(before[name][key], after[name][key]) for name in before for key in before[name])
    step(optimizer, [np.full(40, 512.0)], [variable])
    np.testing.assert_allclose(variable.numpy(), -2 * np.ones(40))


def test_mixed_float16_makes_a_loss_scaling_optimizer(hvd, float16):
    optimizer = wrapped()
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    model = network(optimizer)
    assert model.optimizer is optimizer, "Keras must not put another LossScaleOptimizer around it"
    fit(model)
    assert not ranks_differ(model)
    assert optimizer.compression.stats()["ratio"] > 2


def test_a_loss_scaling_optimizer_around_it_is_refused(hvd):
    """Case L2, the nesting that would hang: it decides on local gradients."""
    with pytest.raises(UsageError, match="Wrap the other way round"):
        keras.optimizers.LossScaleOptimizer(wrapped())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="float32")])
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    with pytest.raises(UsageError, match="Wrap the other way round"):
        model.compile(wrapped(), "mse")


def test_clipping_acts_on_the_reduced_gradient(hvd):
    """Case J7: [6, 8] on rank 0, zeros elsewhere."""
    optimizer = wrapped(keras.optimizers.SGD(1.0, clipnorm=1.0), "none")
    variable = keras.Variable(np.zeros(2, np.float32))
    step(optimizer, [np.array([6.0, 8.0]) if hvd.rank() == 0 else np.zeros(2)], [variable])
    np.testing.assert_allclose(variable.numpy(), [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("traced", [True, False])
def test_a_variable_that_no_rank_uses_stays(hvd, traced):
    """Case J8."""
    optimizer = wrapped(spec="none", backward_passes_per_step=2)
    used, unused = keras.Variable(np.zeros(3, np.float32)), keras.Variable(np.ones(3, np.float32))
    optimizer.build([used, unused])

    def apply():
        optimizer.apply([tf.ones(3) * float(hvd.rank() + 1), None], [used, unused])

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        run = tf.function(apply) if traced else apply
        for _ in range(4):
            run()
    np.testing.assert_allclose(used.numpy(), np.full(3, -0.1 * 4 * (hvd.size() + 1) / 2), rtol=1e-6)
    assert np.array_equal(unused.numpy(), np.ones(3))


def test_what_cannot_be_is_refused(hvd):
    with pytest.raises(SpecError, match="tpok"):
        wrapped(spec="tpok")
    with pytest.raises(SpecError, match="backward_passes_per_step"):
        wrapped(backward_passes_per_step=0)
    with pytest.raises(SpecError, match="do the same"):
        wrapped(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), backward_passes_per_step=2)
    with pytest.raises(SpecError, match="Adasum"):
        wrapped(op=hvd.Adasum)
    with pytest.raises(UsageError, match="already"):
        wrapped(wrapped())
    with pytest.raises(UsageError, match="Keras 3 optimizer"):
        wrapped("sgd")


def test_different_codecs_are_an_error_on_every_rank(hvd):
    model = network(wrapped(spec="sign" if hvd.rank() == 0 else "fp16"))
    with pytest.raises(DisagreementError, match="codec"):
        fit(model)
