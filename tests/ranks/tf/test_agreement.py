"""Ranks that were configured differently; statistics; saving and restoring."""

import time

import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

import hvd_gradcomp.tensorflow as gradcomp
from hvd_gradcomp.errors import DisagreementError, ProcessSetError, SpecError, StateError, UsageError
from hvd_gradcomp.tensorflow import elastic

from .world import TAPES, World, mean_over_ranks, randn

SPEC = "uniform(bits=3, block=64, stochastic=True)"


@pytest.mark.parametrize("tape", TAPES)
def test_a_difference_is_an_error_on_every_rank_that_names_it(hvd, tape):
    last = hvd.size() - 1
    world = World(f"uniform(bits={4 + (hvd.rank() == last)})", {"w": (100,)}, tape=tape)
    start = time.monotonic()
    with pytest.raises(DisagreementError, match=rf"rank {last}: codec is 'uniform\(bits=5\)', not 'uniform\(bits=4\)'"):
        world.reduce({"w": randn(100, seed=1)})
    assert time.monotonic() - start < 60, "an error, not a stall"


def test_another_shape_on_one_rank(hvd):
    world = World("sign", {"w": (100 + (hvd.rank() == 0),)}, tape="ours")
    with pytest.raises(DisagreementError, match="shape of tensor 'w' is"):
        world.reduce({"w": randn(100 + (hvd.rank() == 0), seed=1)})


@pytest.mark.parametrize("tape", TAPES)
def test_stats(hvd, tape):
    world = World("uniform(bits=8, block=None)", {"w": (1000,), "bias": (10,)}, tape=tape, min_size=100)
    assert world.compression.stats()["steps"] == 0
    for seed in range(3):
        world.reduce({"w": randn(1000, seed=seed), "bias": randn(10, seed=seed)})
    stats = world.compression.stats()
    assert stats["steps"] == 3 and stats["ranks"] == hvd.size()
    others = hvd.size() - 1
    gathered, dense_bias = others * 1008, 2 * others / hvd.size() * 40
    assert stats["dense_bytes"] == round(3 * 2 * others / hvd.size() * 4040)
    extra = stats["wire_bytes_received"] - 3 * (gathered + dense_bias)
    assert 0 < extra <= 3 * 2 * others / hvd.size() * 40, "a token or the step flag, and no more"
    assert stats["wire_bytes_sent"] == stats["wire_bytes_received"]
    assert stats["ratio"] == pytest.approx(stats["dense_bytes"] / stats["wire_bytes_received"], rel=1e-3)
    w, bias = stats["tensors"]["w"], stats["tensors"]["bias"]
    assert w["codec"] == "uniform(bits=8, block=None)" and w["payload_bytes"] == 1008
    residual = world.compression.engine.plan.slots["w"].state["residual"].numpy()
    assert residual.any()
    assert w["residual_norm"] == pytest.approx(float(np.sqrt((residual.astype("float64") ** 2).sum())), rel=1e-5)
    assert bias["codec"] is None and "small" in bias["reason"]


@pytest.mark.parametrize("tape", TAPES)
def test_saved_state_goes_on_bitwise(hvd, tape):
    shapes = {"w": (40, 30), "v": (7,)}

    def steps(world, seeds):
        return [world.reduce({name: randn(*shape, seed=seed) for name, shape in shapes.items()})["w"]
                for seed in seeds]

    through = World(SPEC, shapes, tape=tape)
    want = steps(through, range(6))
    first, second = World(SPEC, shapes, tape=tape), World(SPEC, shapes, tape=tape)
    steps(first, range(3))
    saved = first.compression.state_dict()
    assert isinstance(saved["tensors"]["w"]["residual"], np.ndarray)
    second.compression.load_state_dict(saved)
    for out, expected in zip(steps(second, range(3, 6)), want[3:], strict=True):
        assert out.tobytes() == expected.tobytes()


def test_state_that_does_not_fit_changes_nothing(hvd):
    world = World(SPEC, {"w": (40, 30)}, tape="ours")
    world.reduce({"w": randn(40, 30, seed=1)})
    before = world.states()
    saved = world.compression.state_dict()
    other = World(SPEC, {"w": (30, 40)}, tape="ours").compression.state_dict()
    wrong = [{**saved, "rank": hvd.rank() + 1}, {**saved, "ranks": 99}, {**saved, "format": 0}, other, {}]
    for state in wrong:
        with pytest.raises(StateError):
            world.compression.load_state_dict(state)
    for key, array in world.states().items():
        assert array.tobytes() == before[key].tobytes()


def test_two_compressions_in_one_process(hvd):
    one, two = (World("topk(ratio=0.1)", {"w": (100,)}, tape="ours") for _ in range(2))

    @tf.function
    def both(x):
        return one._gradients({"w": x})[0], two._gradients({"w": -x})[0]

    a, b = both(randn(100, seed=1))
    np.testing.assert_array_equal(a, -b)
    assert np.abs(a).max() > 0


def test_what_cannot_be_meant(hvd, part):
    v = tf.Variable(tf.zeros(10), name="v")
    compression = gradcomp.Compression("sign", variables=[v])
    recorded = tf.GradientTape()
    with pytest.raises(UsageError, match=r"create the Compression once.*Compression\('topk\(ratio=0.01\)', variables"):
        gradcomp.DistributedGradientTape(recorded, compression="topk(ratio=0.01)")
    with pytest.raises(SpecError, match="angles"):
        gradcomp.DistributedGradientTape(recorded, compression=compression, op=hvd.Adasum)
    with pytest.raises(SpecError, match="op=Average or op=Sum"):
        gradcomp.DistributedGradientTape(recorded, compression=compression, op=hvd.Max)
    with pytest.raises(SpecError, match="predivide"):
        gradcomp.DistributedGradientTape(recorded, compression=compression, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ProcessSetError):
        gradcomp.DistributedGradientTape(recorded, compression=compression, process_set=part)
    with pytest.raises(UsageError, match="empty"):
        gradcomp.Compression("sign", variables=[])
    with pytest.raises(UsageError, match="twice"):
        gradcomp.Compression("sign", variables=[v, v])
    with pytest.raises(UsageError, match="outside of any"):
        tf.function(lambda: gradcomp.Compression("sign", variables=[v]))()


@pytest.mark.parametrize("tape", TAPES)
def test_a_graph_that_was_traced_before_the_ranks_changed_fails(hvd, tape):
    """Elastic mode: it would exchange for the ranks there were. What is traced afterwards goes on with the state."""
    world = World("topk(ratio=0.1)", {"w": (50,)}, tape=tape)
    world.reduce({"w": randn(50, seed=1)})
    before = world.states()
    hvd.allreduce(tf.ones(1), name="all are here")
    world.compression.rejoin()
    with pytest.raises(tf.errors.InvalidArgumentError, match="traced before the ranks changed"):
        world.reduce({"w": randn(50, seed=2)})
    assert all(np.array_equal(array, before[name]) for name, array in world.states().items())
    if tape == "ours":  # the stock tape's graph is kept by Horovod
        world._run = tf.function(world._gradients)
        total = world.reduce({"w": randn(50, seed=2)})["w"] + world.residual("w")
        kept = hvd.allgather_object(before["w/residual"])
        want = mean_over_ranks(lambda rank: kept[rank] + randn(50, seed=2, rank=rank))
        np.testing.assert_allclose(total, want, atol=1e-5)


def test_another_list_of_variables_is_an_error_on_every_rank(hvd):
    last = hvd.size() - 1
    shapes = {"w": (100,), **({"only here": (7,)} if hvd.rank() == last else {})}
    world = World("sign", shapes, tape="ours")
    with pytest.raises(DisagreementError, match=rf"rank {last}: tensor 'only here' is there; it is missing"):
        world.reduce({name: randn(*shape, seed=1) for name, shape in shapes.items()})


def test_another_version_is_an_error_on_every_rank(hvd, monkeypatch):
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setattr("hvd_gradcomp.plan.__version__", "0.0.9")
    world = World("sign", {"w": (100,)}, tape="ours")
    with pytest.raises(DisagreementError, match=rf"rank {hvd.size() - 1}: version is '0.0.9', not"):
        world.reduce({"w": randn(100, seed=1)})


def test_verify_changes_no_bit_and_must_be_alike(hvd):
    plain, verified = (World("topk(ratio=0.1) + uniform(bits=8)", {"w": (300,)}, tape="ours", verify=verify,
                             exchange="two_stage") for verify in (False, True))
    for seed in range(3):
        grad = {"w": randn(300, seed=seed)}
        assert verified.reduce(grad)["w"].tobytes() == plain.reduce(grad)["w"].tobytes()
    world = World("sign", {"w": (100,)}, tape="ours", verify=hvd.rank() == 0)
    with pytest.raises(DisagreementError, match="verify is"):
        world.reduce({"w": randn(100, seed=1)})


@pytest.mark.parametrize(("message", "ours"), [
    ("Connection closed by peer\n\t [[{{node cond/gradcomp.1a2b.0.w.1.chunks}}]] [Op:__inference]", True),
    ("{{function_node __wrapped__HorovodAlltoall_device_/CPU:0}} Connection reset [Op:HorovodAlltoall]", True),
    ('File "hvd_gradcomp/tensorflow/tape.py", line 1\nZeroDivisionError: x\n\t [[{{node PyFunc}}]]', False)])
def test_elastic_mode_goes_on_after_horovods_failures_only(hvd, message, ours):
    """Any other error would come again after every restore."""
    with pytest.raises(HorovodInternalError if ours else tf.errors.UnknownError), elastic.horovod_errors():
        raise tf.errors.UnknownError(None, None, message)
