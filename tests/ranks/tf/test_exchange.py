"""Exchanges in chunks, traced into a graph."""

import numpy as np
import pytest

from hvd_gradcomp.errors import SpecError

from .world import TAPES, World, assert_equal_on_ranks, mean_over_ranks, randn

SPECS = {"two": "uniform(bits=4)", "split": "topk(ratio=0.1) + uniform(bits=8)", "sign": "sign", "gather": "sign"}
SHAPES = {"two": (57, 31), "two.odd": (1025,), "split": (40, 30), "sign": (2,), "gather": (300,), "two.scalar": ()}


def assert_nothing_is_lost(world):
    """In three steps of tensors of SHAPES: outputs and what is kept are the mean gradients, on ranks of equal bits."""
    received = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(3):
        outs = world.reduce({name: randn(*shape, seed=step) for name, shape in SHAPES.items()})
        for name, out in outs.items():
            assert_equal_on_ranks(out)
            received[name] += out
    for name, shape in SHAPES.items():
        want = mean_over_ranks(lambda rank, shape=shape: sum(randn(*shape, seed=step, rank=rank) for step in range(3)))
        np.testing.assert_allclose(received[name] + world.residual(name), want, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("tape", TAPES)
def test_nothing_is_lost_and_ranks_agree(hvd, tape):
    world = World({f"{name}*": spec for name, spec in SPECS.items()}, SHAPES, tape=tape,
                  exchange={"split*": "sparse_split", "gather*": "gather", "*": "two_stage"})
    assert_nothing_is_lost(world)
    shown = world.compression.stats()["tensors"]
    assert shown["two"]["exchange"] == "two_stage" and shown["split"]["exchange"] == "sparse_split"
    assert world.states()["two/owner_residual"].any()


@pytest.mark.parametrize("tape", TAPES)
def test_hosts_lose_nothing_and_agree(hvd, tape):
    """Declared hosts of two ranks. With two ranks there is one, and with three there are none."""
    if hvd.size() == 3:
        with pytest.raises(SpecError, match="3 ranks are no hosts of 2 each"):
            World("sign", SHAPES, tape=tape, exchange="hierarchical(local=2)")
        return
    world = World({f"{name}*": spec for name, spec in SPECS.items()}, SHAPES, tape=tape,
                  exchange="hierarchical(local=2)")
    assert_nothing_is_lost(world)
    assert world.traces == 1
    if hvd.size() > 2:
        shown = world.compression.stats()["tensors"]
        assert all(shown[name]["exchange"] == "hierarchical(local=2)" for name in SHAPES)
