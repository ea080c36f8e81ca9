"""Both DGC optimizers of TensorFlow give the numbers of torch's, on any number of ranks, one included."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_gradcomp.keras as gradcomp
import hvd_gradcomp.tensorflow as gradcomp_tf
from hvd_gradcomp.errors import SpecError, UsageError
from tests.dgc_reference import Reference

from .world import fit, network, ranks_differ, weights

KINDS = ["tensorflow", "keras"]


def randn(n, seed, rank):
    return np.random.RandomState(1000 * seed + rank).standard_normal(n).astype("float32")


class Run:
    """One variable under DGC in one traced step; every rank's gradient is what the test says."""

    def __init__(self, kind, values, ratio=0.5, sgd=None, *, traced=True, **options):
        self.variable = keras.Variable(np.asarray(values, np.float32))
        base = keras.optimizers.SGD(**{"learning_rate": 1.0, "momentum": 0.9, **(sgd or {})})
        options = {"warmup_steps": 0, "min_size": 0, **options}
        if kind == "keras":
            self.optimizer = gradcomp.DGCOptimizer(base, ratio, **options)
        else:
            self.optimizer = gradcomp_tf.DGCOptimizer(base, [self.variable], ratio, **options)

        def apply(grad):
            self.optimizer.apply_gradients([(grad, self.variable)])

        self._apply = tf.function(apply) if traced else apply

    def step(self, grad):
        self._apply(tf.constant(grad, tf.float32))
        return self.variable.numpy().copy()

    def steps(self, grad, count):
        return [self.step(grad) for _ in range(count)]

    def state(self):
        return self.optimizer.compression.state_dict()["tensors"][
            next(iter(self.optimizer.compression.engine.plan.slots))]


def close(got, want):
    np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("traced", [True, False])
def test_factor_masking(hvd, kind, traced):
    """Case H1, the separating numbers."""
    run = Run(kind, [0.0, 0.0], traced=traced)
    close(run.steps([1.0, 0.4], 4), [[-1, 0], [-1, -1.16], [-3.9, -1.16], [-3.9, -2.32]])


@pytest.mark.parametrize("kind", KINDS)
def test_dense_and_weight_decay(hvd, kind):
    """Cases H1, H2 and H4."""
    close(Run(kind, [0.0], ratio=1.0).steps([1.0], 3), [[-1], [-2.9], [-5.61]])
    run = Run(kind, [1.0, 2.0], sgd={"momentum": 0.0, "weight_decay": 0.1})
    close(run.steps([0.0, 0.0], 2), [[1, 1.8], [0.8, 1.8]])
    close(run.state()["residual"], [0, 0.18])
    for options in ({"ratio": 1.0}, {"min_size": 10}):
        run = Run(kind, [0.0], sgd={"momentum": 0.5}, **options)
        for grad in (1.0, 0.0, 1.0):
            last = run.step([grad])
        close(last, [-2.75])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [
    {}, {"nesterov": True, "weight_decay": 0.05, "clip_norm": 3.0}], ids=["plain", "all"])
def test_as_the_paper_says(hvd, kind, options):
    """Different gradients on every rank; dense for three steps, whose momentum the velocity takes over."""
    n, k = 60, 3
    start = randn(n, 99, 0)
    sgd = {"learning_rate": 0.1, **{key: value for key, value in options.items() if key != "clip_norm"}}
    run = Run(kind, start, k / n, sgd, begin_step=3, clip_norm=options.get("clip_norm"))
    reference = Reference(start, hvd.size(), lambda step: None if step < 3 else k, lr=0.1, **options)
    for step in range(9):
        want = reference.step([randn(n, step, rank) for rank in range(hvd.size())])
        np.testing.assert_allclose(run.step(randn(n, step, hvd.rank())), want, atol=1e-5)
    np.testing.assert_allclose(run.state()["momentum"], reference.u[hvd.rank()], atol=1e-5)
    np.testing.assert_allclose(run.state()["residual"], reference.v[hvd.rank()], atol=1e-5)
    assert int(run.optimizer.optimizer.iterations if kind == "tensorflow" else run.optimizer.iterations) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_variable_is_plain_sgd(hvd, kind):
    n = 10
    start = randn(n, 99, 0)
    options = {"nesterov": True, "weight_decay": 0.05}
    run = Run(kind, start, 0.1, {"learning_rate": 0.1, **options}, min_size=n + 1)
    reference = Reference(start, hvd.size(), lambda step: None, lr=0.1, **options)
    for step in range(5):
        want = reference.step([randn(n, step, rank) for rank in range(hvd.size())])
        np.testing.assert_allclose(run.step(randn(n, step, hvd.rank())), want, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_of_the_learning_rate(hvd, kind):
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.1])
    close(Run(kind, [0.0, 0.0], sgd={"learning_rate": rate}).steps([1.0, 0.0], 3), [[-1, 0], [-1.1, 0], [-1.2, 0]])


def test_a_step_with_a_nan_moves_nothing_it_keeps(hvd):
    run = Run("tensorflow", np.zeros(20), 0.1)
    run.step(randn(20, 0, hvd.rank()))
    before = run.state()
    run.step(np.full(20, np.nan) if hvd.rank() == 0 else np.ones(20))
    assert all(np.array_equal(before[key], run.state()[key]) for key in before)
    assert np.isnan(run.variable.numpy()).all()


def test_fit(hvd):
    def train(optimizer):
        model = network(optimizer)
        return model, fit(model)

    sgd = {"learning_rate": 0.02, "momentum": 0.9}
    optimizer = gradcomp.DGCOptimizer(keras.optimizers.SGD(**sgd), 0.02, warmup_steps=8, min_size=256,
                                      value_codec="uniform(bits=8)")
    model, losses = train(optimizer)
    assert not ranks_differ(model)
    assert losses[-1] < losses[0]
    assert "ratio=0.02" in str(optimizer.compression.stats()["tensors"])
    dense, _ = train(gradcomp.DGCOptimizer(keras.optimizers.SGD(**sgd), 1.0))
    stock, _ = train(gradcomp.DistributedOptimizer(keras.optimizers.SGD(**sgd)))
    np.testing.assert_allclose(weights(dense), weights(stock), atol=1e-5)


def test_backward_passes_per_step(hvd):
    run = Run("keras", [0.0, 0.0], backward_passes_per_step=2)
    close(run.steps([0.5, 0.2], 8)[1::2], [[-1, 0], [-1, -1.16], [-3.9, -1.16], [-3.9, -2.32]])


def test_a_saved_model_comes_back_as_dgc(hvd, tmp_path):
    """Case K3."""
    file = Path(hvd.broadcast_object(str(tmp_path), root_rank=0)) / "model.keras"
    model = network(gradcomp.DGCOptimizer(keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True), 0.05, 6, [0.5, 0.1],
                                          begin_step=2, clip_norm=2.0, min_size=256))
    fit(model, epochs=1)
    if hvd.rank() == 0:
        model.save(file)
    hvd.allreduce(tf.ones(1), name="saved")
    loaded = keras.models.load_model(file)
    assert loaded.optimizer.arguments == model.optimizer.arguments
    assert loaded.optimizer.settings == model.optimizer.settings
    assert loaded.optimizer.nesterov and loaded.optimizer.momentum == 0.9
    fit(loaded, epochs=1)
    assert not ranks_differ(loaded)


def test_loss_scaling_changes_nothing_but_the_void_step(hvd):
    """Case L2: the same numbers at scale 1024; an inf on one rank is skipped on all, and halves the scale."""
    scaled = Run("keras", np.zeros(40), 0.1)
    inner = keras.optimizers.SGD(1.0, momentum=0.9)
    scaled.optimizer = gradcomp.DGCOptimizer(keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0), 0.1,
                                             warmup_steps=0, min_size=0)
    plain = Run("keras", np.zeros(40), 0.1)
    for step, scale in enumerate((1024.0, 1024.0, 512.0, 512.0)):
        grad = randn(40, step, hvd.rank())
        if step == 1:
            scaled.step(np.full(40, np.inf) if hvd.rank() == 0 else grad * scale)
        else:
            np.testing.assert_allclose(scaled.step(grad * scale), plain.step(grad), rtol=1e-6, atol=1e-6)
    assert float(scaled.optimizer.dynamic_scale) == 512.0


def test_mixed_float16(hvd, tmp_path):
    file = Path(hvd.broadcast_object(str(tmp_path), root_rank=0)) / "model.keras"
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = gradcomp.DGCOptimizer(keras.optimizers.SGD(0.02, momentum=0.9), 0.05, 0, min_size=256)
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        model = network(optimizer)
        assert model.optimizer is optimizer
        fit(model, epochs=1)
        assert not ranks_differ(model)
        if hvd.rank() == 0:
            model.save(file)
        hvd.allreduce(tf.ones(1), name="saved")
        loaded = keras.models.load_model(file)
        assert loaded.optimizer.arguments == optimizer.arguments
        fit(loaded, epochs=1)
        assert not ranks_differ(loaded)
    finally:
        keras.config.set_dtype_policy("float32")


def test_what_cannot_be_is_refused(hvd):
    def make(optimizer=None, **options):
        return gradcomp.DGCOptimizer(optimizer or keras.optimizers.SGD(0.1), **options)

    with pytest.raises(UsageError, match=r"Adam.*DistributedOptimizer"):
        make(keras.optimizers.Adam())
    with pytest.raises(UsageError, match="clip_norm= of DGCOptimizer"):
        make(keras.optimizers.SGD(0.1, clipnorm=1.0))
    with pytest.raises(UsageError, match="backward_passes_per_step"):
        make(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(SpecError, match="clip_norm"):
        make(clip_norm=-1.0)
    with pytest.raises(SpecError, match="ratio"):
        make(ratio=0)


def test_a_custom_loop_is_resumed(hvd):
    """Bitwise, by the compression's state of each rank and the optimizer's variables, which all ranks share."""
    shapes = {"large": 40, "small": 4}

    def make():
        variables = [keras.Variable(np.zeros(n, np.float32), name=name) for name, n in shapes.items()]
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        return variables, gradcomp_tf.DGCOptimizer(sgd, variables, 0.1, warmup_steps=4, begin_step=1, min_size=10)

    def steps(variables, optimizer, numbers):
        for number in numbers:
            grads = [tf.constant(randn(n, number, hvd.rank())) for n in shapes.values()]
            optimizer.apply_gradients(zip(grads, variables, strict=True))
        return [variable.numpy().tobytes() for variable in variables]

    straight, resumed = make(), make()
    steps(*straight, range(4))
    assert len(straight[1].variables) == 2, "the small one's velocity, and the number of steps"
    pairs = zip([*resumed[0], *resumed[1].variables], [*straight[0], *straight[1].variables], strict=True)
    for target, source in pairs:
        target.assign(source)
    resumed[1].compression.load_state_dict(straight[1].compression.state_dict())
    assert steps(*resumed, range(4, 7)) == steps(*straight, range(4, 7))
    assert int(resumed[1].optimizer.iterations) == 7
