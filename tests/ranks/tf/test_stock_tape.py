"""Horovod's own tape: its options, and calls that cannot be told apart."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_gradcomp.tensorflow as gradcomp
from hvd_gradcomp.errors import UsageError

from .world import World, assert_equal_on_ranks, randn

SHAPES = {"a": (40, 30), "b": (500,), "c": (40, 30)}


def grads(seed):
    return {name: randn(*shape, seed=seed + ord(name)) for name, shape in SHAPES.items()}


def test_options_change_nothing(hvd):
    options = [{}, {"gradient_predivide_factor": 3.0}, {"groups": 1}, {"groups": 2}, {"sparse_as_dense": True}]
    plain, *others = [World("sign", SHAPES, tape="stock", options=option) for option in options]
    for seed in range(3):
        want = plain.reduce(grads(seed))
        for other, option in zip(others, options[1:], strict=True):
            out = other.reduce(grads(seed))
            for name in SHAPES:
                np.testing.assert_array_equal(out[name], want[name], err_msg=f"{option}, {name}")


def test_our_tape_honours_predivide(hvd):
    shapes = {"a": (40, 30), "small": (5,)}
    plain = World("uniform(bits=4)", shapes, tape="ours", min_size=10)
    other = World("uniform(bits=4)", shapes, tape="ours", min_size=10, options={"gradient_predivide_factor": 3.0})
    grad = {name: randn(*shape, seed=1) for name, shape in shapes.items()}
    want, out = plain.reduce(grad), other.reduce(grad)
    np.testing.assert_array_equal(out["a"], want["a"])
    np.testing.assert_allclose(out["small"], want["small"], rtol=1e-6)


def test_both_tapes_give_the_same(hvd):
    stock, ours = (World("topk(ratio=0.1)", SHAPES, tape=tape) for tape in ("stock", "ours"))
    for seed in range(3):
        want, out = stock.reduce(grads(seed)), ours.reduce(grads(seed))
        for name in SHAPES:
            np.testing.assert_array_equal(out[name], want[name])


@pytest.mark.parametrize("traced", [True, False], ids=["function", "eager"])
def test_a_missing_gradient_is_an_error(hvd, traced):
    """Without b the third gradient would be taken for b's, or with equal shapes silently mixed up."""
    world = World("sign", {"a": (30,), "b": (30,), "c": (30,)}, tape="stock", traced=traced)
    before = world.states()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"was given 3 variables") as caught:
        world.reduce({"a": randn(30, seed=1), "c": randn(30, seed=2)})
    assert "hvd_gradcomp.tensorflow.DistributedGradientTape" in str(caught.value)
    for key, array in world.states().items():
        assert array.tobytes() == before[key].tobytes(), f"{key} moved"


def test_another_shape_is_an_error(hvd):
    world = World("sign", {"a": (30,), "b": (31,), "c": (30,)}, tape="stock")
    with pytest.raises(UsageError, match=r"gradient 2 .*float32\[30\].*'b' \(float32\[31\]\).*hvd_gradcomp.*Tape"):
        world.reduce({"a": randn(30, seed=1), "c": randn(30, seed=2)})


def test_more_gradients_than_variables_are_an_error(hvd):
    a, b = tf.Variable(tf.zeros(30)), tf.Variable(tf.zeros(30))
    compression = gradcomp.Compression("sign", variables=[a], min_size=0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(a + b)
    with pytest.raises(UsageError, match="more gradients in one graph than the 1 variables"):
        hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [a, b])


def test_an_embedding_beside_bound_variables(hvd):
    """IndexedSlices never reach compress: bound, they are an error; left out, all is well."""
    table, head = tf.Variable(tf.zeros((20, 4))), tf.Variable(tf.zeros(300))

    def gradients(compression):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 19])) + tf.reduce_sum(head)
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [table, head])

    with pytest.raises(UsageError, match="gradient 1"):
        gradients(gradcomp.Compression("sign", variables=[table, head], min_size=0))
    out, dense = gradients(gradcomp.Compression("sign", variables=[head], min_size=0))
    np.testing.assert_allclose(tf.convert_to_tensor(out)[19], np.ones(4))
    np.testing.assert_allclose(dense, np.ones(300))


def test_retraces_are_legal(hvd):
    world = World("topk(ratio=0.1)", {"w": (100,)}, tape="stock")
    reference = World("topk(ratio=0.1)", {"w": (100,)}, tape="stock")

    @tf.function
    def step(x):
        return world._gradients({"w": tf.reduce_sum(x, 0)})[0]

    for rows in (1, 2, 3, 1):
        grad = randn(100, seed=rows)
        out = step(np.concatenate([grad[None], np.zeros((rows - 1, 100), "float32")]))
        np.testing.assert_array_equal(out, reference.reduce({"w": grad})["w"])
    assert world.traces == 3


def test_eager_functions_are_refused(hvd):
    world = World("sign", {"w": (100,)}, tape="stock")
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(UsageError, match="called eagerly"):
            world.reduce({"w": randn(100, seed=1)})
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("given_to", ["tape", "compression"])
def test_a_process_set_given_to_one_side_only_is_an_error(hvd, part, given_to):
    """It would be a wrong mean, or a hang: an error on every rank that reduces."""
    options, kwargs = ({"process_set": part}, {}) if given_to == "tape" else ({}, {"process_set": part})
    world = World("sign", {"w": (100,)}, tape="stock", options=options, **kwargs)
    grad = {"w": randn(100, seed=1)}
    reduces = given_to == "compression" or (part.included() and part.size() > 1)
    if not reduces:  # Horovod gives this rank its own gradient back
        np.testing.assert_array_equal(world.reduce(grad)["w"], grad["w"])
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="different process sets"):
        world.reduce(grad)


@pytest.mark.parametrize("tape", ["stock", "ours"])
def test_a_process_set_given_to_both(hvd, part, tape):
    world = World("uniform(bits=8)", {"w": (100,)}, tape=tape, options={"process_set": part}, process_set=part)
    out = world.reduce({"w": np.full(100, float(hvd.rank()), "float32")})["w"]
    want = np.mean(part.ranks) if part.included() else hvd.rank()
    np.testing.assert_allclose(out, np.full(100, want), rtol=1e-6)


def test_adasum_is_refused(hvd):
    world = World("sign", {"w": (100,)}, tape="stock", options={"op": hvd.Adasum})
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.OpError, NotImplementedError)):
        world.reduce({"w": randn(100, seed=1)})
    assert not world.states()["w/residual"].any()


def test_unlike_graphs_do_not_change_names(hvd):
    """Ops that only one rank has before the reduction must not shift our names."""
    world = World("fp16", {"w": (100,)}, tape="ours")

    @tf.function
    def step(x):
        for _ in range(3 * hvd.rank()):
            x = tf.identity(tf.reshape(x, (100,)))
        return world._gradients({"w": x})[0]

    out = step(np.full(100, float(hvd.rank()), "float32"))
    np.testing.assert_allclose(out, np.full(100, (hvd.size() - 1) / 2), rtol=1e-3)
    assert_equal_on_ranks(out)
