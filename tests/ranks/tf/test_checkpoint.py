"""Checkpoints written and read by real ranks: ours, and tf.train.Checkpoint."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvd_gradcomp import checkpoint
from hvd_gradcomp.errors import StateError, UsageError

from .world import World, randn

SHAPES = {"w": (33, 31), "v": (100,)}
SPECS = {"w": "powersgd(rank=2)", "v": "topk(ratio=0.1) + uniform(bits=3, stochastic=True)"}
"""A warm start, and randomness with a step count, by tensor."""


@pytest.fixture
def folder(hvd, tmp_path_factory) -> Path:
    """One that all ranks know."""
    mine = str(tmp_path_factory.mktemp("checkpoint")) if hvd.rank() == 0 else ""
    return Path(hvd.broadcast_object(mine))


def grads(step):
    return {name: randn(*shape, seed=step) for name, shape in SHAPES.items()}


def ours(world, path, rank):
    checkpoint.save(path, world.compression)
    return lambda other: checkpoint.load(path, other.compression)


def tensorflows(world, path, rank):
    """One for each rank, with a variable of the user's beside the Compression."""
    counter = tf.Variable(7)
    written = tf.train.Checkpoint(compression=world.compression, counter=counter).save(f"{path}/rank{rank}")

    def load(other):
        restored = tf.Variable(0)
        tf.train.Checkpoint(compression=other.compression, counter=restored).restore(written).assert_consumed()
        assert int(restored) == 7

    return load


@pytest.mark.parametrize("save", [ours, tensorflows])
def test_saved_loaded_and_continued(hvd, folder, save):
    """Case K1 (d): the same bits as without the interruption; loading retraces nothing."""
    straight, resumed = World(SPECS, SHAPES, tape="ours"), World(SPECS, SHAPES, tape="ours")
    resumed.reduce(grads(9))
    for step in range(3):
        straight.reduce(grads(step))
    save(straight, folder, hvd.rank())(resumed)
    assert all(np.array_equal(array, straight.states()[name]) for name, array in resumed.states().items())
    for step in range(3, 6):
        out, want = resumed.reduce(grads(step)), straight.reduce(grads(step))
        for name in SHAPES:
            if "powersgd" in SPECS[name] and hvd.size() > 2:  # Gloo adds floats in an order of its own
                np.testing.assert_allclose(out[name], want[name], rtol=0, atol=1e-4)
            else:
                assert np.array_equal(out[name], want[name])
    assert resumed.traces == 1


def test_another_ranks_tensorflow_checkpoint_is_refused(hvd, folder):
    """Case K1 (b): one rank's residual must not become everyone's."""
    world = World("topk(ratio=0.1)", SHAPES, tape="ours")
    world.reduce(grads(0))
    tf.train.Checkpoint(compression=world.compression).write(f"{folder}/rank{hvd.rank()}")
    hvd.allreduce(tf.ones(1), name="written")
    before = world.states()
    other = (hvd.rank() + 1) % hvd.size()
    with pytest.raises(StateError, match=f"state of rank {other} of {hvd.size()}, but this is rank {hvd.rank()}"):
        tf.train.Checkpoint(compression=world.compression).read(f"{folder}/rank{other}")
    assert all(np.array_equal(array, before[name]) for name, array in world.states().items())


def test_a_compression_is_not_copied(hvd):
    """Case J5."""
    world = World("sign", {"w": (50,)}, tape="ours")
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="state_dict"):
            copier(world.compression)
