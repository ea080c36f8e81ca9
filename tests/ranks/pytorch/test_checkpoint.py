"""Checkpoints written and read by real ranks."""

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch

from hvd_gradcomp import checkpoint
from hvd_gradcomp.errors import StateError, UsageError

from .world import World, randn

SHAPES = {"w": (33, 31), "v": (100,), "u": (64,)}
SPECS = {"w": "powersgd(rank=2, iterations=2)", "v": "topk(ratio=0.1) + uniform(bits=3, stochastic=True)",
         "u": "vq(dim=2, codewords=16, codebook='learned', refresh=3)"}
"""A warm start, randomness with a step count, and a learned codebook, by tensor."""


@pytest.fixture
def folder(hvd, tmp_path_factory) -> Path:
    """One that all ranks know."""
    mine = str(tmp_path_factory.mktemp("checkpoint")) if hvd.rank() == 0 else ""
    return Path(hvd.broadcast_object(mine))


def grads(step):
    return {name: randn(*shape, seed=step) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("one_file", [False, True])
def test_saved_loaded_and_continued(hvd, folder, one_file):
    """Case K1 (d): the same bits as without the interruption."""
    straight, resumed = World(SPECS, SHAPES), World(SPECS, SHAPES)
    for step in range(3):
        straight.reduce(grads(step))
    checkpoint.save(folder / "state", straight.compression, one_file=one_file)
    checkpoint.load(folder / "state", resumed.compression)
    assert all(torch.equal(array, straight.states()[name]) for name, array in resumed.states().items())
    for step in range(3, 6):
        out, want = resumed.reduce(grads(step)), straight.reduce(grads(step))
        for name in SHAPES:
            if "powersgd" in SPECS[name] and hvd.size() > 2:  # Gloo adds floats in an order of its own
                torch.testing.assert_close(out[name], want[name], rtol=0, atol=1e-4)
            else:
                assert torch.equal(out[name], want[name])


def test_an_error_on_one_rank_is_the_same_on_all(hvd, folder):
    world = World("topk(ratio=0.1)", SHAPES)
    world.reduce(grads(0))
    before = world.states()
    checkpoint.save(folder, world.compression)
    last = hvd.size() - 1
    if hvd.rank() == last:
        file = next(folder.glob(f"*rank{last}-of-*.npz"))
        os.truncate(file, file.stat().st_size // 2)
    world.reduce(grads(1))
    moved = world.states()
    says = rf"1 of {last + 1} ranks\n  rank {last}: .*rank{last}-of-{last + 1}.npz is truncated"
    with pytest.raises(StateError, match=says):
        checkpoint.load(folder, world.compression)
    assert all(torch.equal(array, moved[name]) for name, array in world.states().items())
    assert not torch.equal(moved["w/residual"], before["w/residual"])


def test_state_holds_tensors_and_plain_values(hvd, tmp_path):
    """torch.load's safe mode opens it."""
    world = World("powersgd(rank=2)", SHAPES)
    world.reduce(grads(0))
    torch.save(world.compression.state_dict(), tmp_path / "state.pt")
    world.compression.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_a_compression_is_not_copied(hvd):
    """Case J5: it is bound to the parameters of one optimizer; its state can be copied, and its codecs."""
    world = World("topk(ratio=0.1) + uniform(bits=8)", {"w": (50,)})
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="state_dict"):
            copier(world.compression)
    codec = world.compression.plan.slots["w"].codec
    assert copy.deepcopy(codec) == codec == pickle.loads(pickle.dumps(codec))
    world.reduce({"w": randn(50, seed=1)})
    for saved in (copy.deepcopy(world.compression.state_dict()),
                  pickle.loads(pickle.dumps(world.compression.state_dict()))):
        world.compression.load_state_dict(saved)


def test_optimizer_and_scheduler_states_are_saved(hvd, tmp_path):
    """Case J5, on one rank while the others go on."""
    world = World("topk(ratio=0.1)", {"w": (50,)})
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(world.optimizer, max_lr=0.1, total_steps=10),
                  torch.optim.lr_scheduler.StepLR(world.optimizer, 1)]
    world.reduce({"w": randn(50, seed=1)})
    with world.optimizer.skip_synchronize():
        world.optimizer.step()
    if hvd.rank() == 0:
        torch.save([world.optimizer.state_dict(), *(each.state_dict() for each in schedulers)], tmp_path / "all.pt")
        loaded = torch.load(tmp_path / "all.pt", weights_only=False)
        world.optimizer.load_state_dict(loaded[0])
    world.reduce({"w": randn(50, seed=2)})
