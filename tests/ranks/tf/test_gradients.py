"""Gradients that are not finite, not there, not dense, not float32 or hardly there at all."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_gradcomp.tensorflow as gradcomp
from hvd_gradcomp.errors import UsageError

from .world import TAPES, World, assert_equal_on_ranks, mean_over_ranks, randn

SHAPES = {"a": (40, 30), "b": (500,), "small": (3,)}
STATEFUL = "uniform(bits=3, block=64, stochastic=True)"


def grads(seed):
    return {name: randn(*shape, seed=seed + len(name)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("where", "bad"), [("a", np.nan), ("small", np.inf)])
def test_our_tape_a_bad_value_anywhere_voids_the_step_everywhere(hvd, where, bad):
    world, clean = (World(STATEFUL, SHAPES, tape="ours", min_size=4) for _ in range(2))
    world.reduce(grads(1))
    clean.reduce(grads(1))
    before = world.states()
    assert any(array.any() for array in before.values())
    spoilt = grads(2)
    if hvd.rank() == hvd.size() - 1:
        spoilt[where].flat[-1] = bad
    out = world.reduce(spoilt)
    assert all(np.isnan(array).all() for array in out.values())
    for key, array in world.states().items():
        assert array.tobytes() == before[key].tobytes(), f"{key} moved in a void step"
    after, want = world.reduce(grads(3)), clean.reduce(grads(3))
    for name in SHAPES:
        assert after[name].tobytes() == want[name].tobytes(), f"{name} remembers the void step"


@pytest.mark.parametrize("bad", [np.inf])
def test_stock_tape_a_bad_value_voids_that_tensor_everywhere(hvd, bad):
    world, clean = (World(STATEFUL, SHAPES, tape="stock", min_size=4) for _ in range(2))
    world.reduce(grads(1))
    clean.reduce(grads(1))
    before = world.states()
    spoilt = grads(2)
    if hvd.rank() == 0:
        spoilt["a"].flat[7] = bad
    out = world.reduce(spoilt)
    assert np.isnan(out["a"]).all()
    assert np.isfinite(out["b"]).all() and np.isfinite(out["small"]).all()
    states = world.states()
    assert states["a/residual"].tobytes() == before["a/residual"].tobytes()
    assert states["b/residual"].tobytes() != before["b/residual"].tobytes()
    after, want = world.reduce(grads(3)), clean.reduce(grads(3))
    assert after["a"].tobytes() == want["a"].tobytes()


@pytest.mark.parametrize("tape", TAPES)
def test_tensors_of_few_or_no_elements(hvd, tape):
    """Case C3: 0-d tensors, compressed or not; and those without elements."""
    for min_size in (0, 100):
        world = World("sign", {"scalar": (), "one": (1,), "empty": (0, 5)}, tape=tape, min_size=min_size)
        out = world.reduce({"scalar": np.float32(1.0 + hvd.rank()), "one": np.float32([hvd.rank()]),
                            "empty": np.zeros((0, 5), "float32")})
        assert [out[name].shape for name in out] == [(), (1,), (0, 5)]
        np.testing.assert_allclose(out["scalar"], (hvd.size() + 1) / 2, rtol=1e-6)
        np.testing.assert_allclose(out["one"], [(hvd.size() - 1) / 2], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("tape", TAPES)
def test_dtypes(hvd, tape, dtype):
    """Case D3: the right mean in the variable's dtype, compressed and not (complex: never compressed)."""
    target = tf.as_dtype(dtype)
    for min_size in (0, 100):
        if tape == "stock" and dtype == "complex64":
            continue  # World's loss takes the real part, which is enough for our tape's dense path
        world = World("uniform(bits=8)", {"w": (7, 3)}, tape=tape, dtype=dtype, min_size=min_size)
        for value in (1.0, 1.0):
            out = world._run({"w": tf.cast(tf.fill((7, 3), value + 2.0 * hvd.rank()), target)})[0]
            assert out.dtype == target and out.shape == (7, 3)
            np.testing.assert_array_equal(tf.cast(out, tf.complex64), np.full((7, 3), float(hvd.size()), "complex64"))
        reason = world.compression.stats()["tensors"]["w"].get("reason", "")
        assert ("dtype complex64" in reason) == (dtype == "complex64" and min_size == 0) or "small" in reason


@pytest.mark.parametrize("min_size", [0, 100], ids=["compressed", "dense"])
def test_a_variable_that_only_some_ranks_use(hvd, min_size):
    """Case I2: rank 0 uses only a, the others only b, of one shape; c is used by none.

    The zeros of the unused one are a constant, which must not be folded into the graph: its peers
    would wait from the second step on.
    """
    variables = {name: tf.Variable(tf.zeros((50,)), name=name) for name in "abc"}
    compression = gradcomp.Compression("uniform(bits=8)", variables=variables.values(), min_size=min_size)
    used = variables["a" if hvd.rank() == 0 else "b"]

    def gradients(unconnected):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(used * (4.0 if hvd.rank() == 0 else 8.0))
        tape = gradcomp.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, list(variables.values()), unconnected_gradients=unconnected)

    traced = tf.function(gradients)
    for run in (gradients, traced, traced, traced):
        a, b, c = run(tf.UnconnectedGradients.NONE)
        np.testing.assert_allclose(a, np.full(50, 4.0 / hvd.size()), rtol=1e-6)
        np.testing.assert_allclose(b, np.full(50, 8.0 * (hvd.size() - 1) / hvd.size()), rtol=1e-6)
        assert c is None
    # c was None everywhere when these variables first came together: a gradient now is no silent local one
    used = variables["c"]
    with pytest.raises(UsageError, match=r"'c'.*unconnected_gradients"):
        gradients(tf.UnconnectedGradients.NONE)


def test_unconnected_gradients_zero(hvd):
    a, b = tf.Variable(tf.zeros((50,)), name="a"), tf.Variable(tf.zeros((50,)), name="b")
    compression = gradcomp.Compression("sign", variables=[a, b], min_size=0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(a)
    tape = gradcomp.DistributedGradientTape(tape, compression=compression)
    out = tape.gradient(loss, {"x": b, "y": [a]}, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    np.testing.assert_array_equal(out["x"], np.zeros(50))
    np.testing.assert_array_equal(out["y"][0], np.ones(50))


def test_sources_in_another_order_and_in_part(hvd):
    shape = (60,)
    world = World("topk(ratio=0.1)", {"a": shape, "b": shape, "c": shape}, tape="ours")
    values = {name: randn(*shape, seed=ord(name)) for name in "abc"}
    want = World("topk(ratio=0.1)", {"a": shape, "b": shape, "c": shape}, tape="ours").reduce(values)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v * values[name]) for name, v in world.variables.items()])
    tape = gradcomp.DistributedGradientTape(tape, compression=world.compression)
    c, a = tape.gradient(loss, [world.variables["c"], world.variables["a"]])
    np.testing.assert_array_equal(a, want["a"])
    np.testing.assert_array_equal(c, want["c"])
    assert [entry["steps"] for entry in world.compression.stats()["tensors"].values()] == [1, 0, 1]


def test_a_source_that_was_not_bound_is_an_error(hvd):
    world = World("sign", {"a": (10,)}, tape="ours")
    stranger = tf.Variable(tf.zeros(10), name="stranger")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(stranger)
    with pytest.raises(UsageError, match="'stranger' is not one of the 1 variables"):
        gradcomp.DistributedGradientTape(tape, compression=world.compression).gradient(loss, [stranger])


@pytest.mark.parametrize("as_dense", [False, True])
def test_indexed_slices_on_our_tape(hvd, as_dense):
    """Cases A3, F2, J8: the same row from all ranks adds up; a rank without the embedding sends none."""
    table = tf.Variable(tf.zeros((20, 4)), name="table")
    head = tf.Variable(tf.zeros((300,)), name="head")
    compression = gradcomp.Compression("uniform(bits=8)", variables=[table, head], min_size=0)

    @tf.function
    def step(rows, op):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(head) * 3.0
            if hvd.rank() > 0:
                loss += tf.reduce_sum(tf.gather(table, rows)) * float(hvd.rank())
        tape = gradcomp.DistributedGradientTape(tape, compression=compression, op=op, sparse_as_dense=as_dense)
        return tape.gradient(loss, [table, head])

    want = np.zeros((20, 4))
    for rank in range(1, hvd.size()):
        for row in (3, 3, 5 + rank):
            want[row] += rank
    rows = tf.constant([3, 3, 5 + hvd.rank()])
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, hvd.size())):
        out, dense = step(rows, op)
        assert isinstance(out, tf.IndexedSlices) != as_dense
        tolerance = {"rtol": 1e-6} if not as_dense else {"atol": factor * want.max() / 255}
        np.testing.assert_allclose(tf.convert_to_tensor(out), factor * want / hvd.size(), **tolerance)
        np.testing.assert_allclose(dense, np.full(300, 3.0 * factor), rtol=1e-6)
    reason = compression.stats()["tensors"]["table"].get("reason")
    assert reason is None if as_dense else "sparse" in reason


def test_a_bad_value_in_indexed_slices_voids_the_step(hvd):
    table, head = tf.Variable(tf.zeros((20, 4)), name="table"), tf.Variable(tf.zeros((300,)), name="head")
    compression = gradcomp.Compression("sign", variables=[table, head], min_size=0)
    with tf.GradientTape() as tape:
        scale = np.nan if hvd.rank() == 0 else 1.0
        loss = tf.reduce_sum(tf.gather(table, [1, 2])) * scale + tf.reduce_sum(head * randn(300, seed=1))
    out, dense = gradcomp.DistributedGradientTape(tape, compression=compression).gradient(loss, [table, head])
    assert np.isnan(out.values).all() and np.isnan(dense).all()
    assert not compression.engine.plan.slots["head"].state["residual"].numpy().any()


def test_slices_of_many_sizes_on_one_rank_only(hvd):
    """Retraces that the other ranks do not make must not wait for them."""
    table = tf.Variable(tf.zeros((20, 4)), name="table")
    compression = gradcomp.Compression("sign", variables=[table], min_size=0)

    @tf.function
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows))
        return tape_of(tape).gradient(loss, [table])[0]

    def tape_of(tape):
        return gradcomp.DistributedGradientTape(tape, compression=compression, op=hvd.Sum)

    for count in range(1, 4):
        mine = count if hvd.rank() == 0 else 2
        out = tf.convert_to_tensor(step(tf.fill((mine,), 7)))
        np.testing.assert_array_equal(out[7], np.full(4, count + 2.0 * (hvd.size() - 1)))


def test_two_steps_unrolled_in_one_function(hvd):
    """Their collectives must not share names; the second sees the first one's residual."""
    world = World("topk(ratio=0.05)", {"w": (200,)}, tape="ours")
    reference = World("topk(ratio=0.05)", {"w": (200,)}, tape="ours")
    first, second = randn(200, seed=1), randn(200, seed=2)

    @tf.function
    def both(x, y):
        return world._gradients({"w": x}) + world._gradients({"w": y})

    outs = both(first, second)
    for out, grad in zip(outs, (first, second), strict=True):
        np.testing.assert_array_equal(out, reference.reduce({"w": grad})["w"])


def test_a_keras_model_with_our_tape_in_eager_mode(hvd):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(1)])
    model.build((None, 8))
    compression = gradcomp.Compression("sign", variables=model.trainable_variables, min_size=0)
    x = randn(4, 8, seed=5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
    out = gradcomp.DistributedGradientTape(tape, compression=compression).gradient(loss, model.trainable_variables)
    assert [tuple(g.shape) for g in out] == [tuple(v.shape) for v in model.trainable_variables]
    assert_equal_on_ranks(np.concatenate([g.numpy().ravel() for g in out]))
    assert set(compression.stats()["tensors"]) == {v.path for v in model.trainable_variables}


def test_horovods_own_compressors_with_our_tape(hvd):
    v = keras.Variable(np.zeros(30, "float32"))
    for own in (gradcomp.Compression.none, gradcomp.Compression.fp16):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v.value * float(hvd.rank()))
        out = gradcomp.DistributedGradientTape(tape, compression=own).gradient(loss, [v])
        np.testing.assert_allclose(out[0], np.full(30, (hvd.size() - 1) / 2))
    assert gradcomp.Compression.none is hvd.Compression.none and gradcomp.Compression.fp16 is hvd.Compression.fp16


def test_local_sources_stay_local(hvd):
    world = World("sign", {"a": (30,), "b": (30,)}, tape="ours")
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) * float(hvd.rank() + 1) for v in world.variables.values()])
    tape = gradcomp.DistributedGradientTape(tape, compression=world.compression)
    tape.register_local_source(world.variables["a"])
    a, b = tape.gradient(loss, list(world.variables.values()))
    np.testing.assert_allclose(a, np.full(30, (hvd.rank() + 1) / hvd.size()), rtol=1e-6)
    np.testing.assert_allclose(b, np.full(30, (hvd.size() + 1) / 2), rtol=1e-6)


def test_loss_scale_keeps_residuals_in_gradient_units(hvd):
    scale = tf.Variable(8.0)
    scaled = World("topk(ratio=0.1)", {"w": (100,)}, tape="ours", loss_scale=scale)
    plain = World("topk(ratio=0.1)", {"w": (100,)}, tape="ours")
    for step, factor in enumerate((8.0, 2.0)):
        scale.assign(factor)
        grad = randn(100, seed=step)
        np.testing.assert_array_equal(scaled.reduce({"w": grad * factor})["w"] / factor, plain.reduce({"w": grad})["w"])
    assert mean_over_ranks(lambda rank: plain.residual("w")).any()
    np.testing.assert_array_equal(scaled.residual("w"), plain.residual("w"))
