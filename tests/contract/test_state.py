"""Saved, restored and resized state, for every codec, in lockstep worlds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvd_gradcomp import checkpoint, state
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.exchange.two_stage import OWNER, bounds
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.plan import Plan
from tests.contract import values
from tests.contract.laws import MIN_SIZE, SHAPES
from tests.contract.specs import ALL, CARRIED, COMPRESSING, LAST
from tests.contract.values import Grads

STAGES: dict[int, Any] = {0: "none", 1: "topk(ratio=0.2)", 3: "powersgd(rank=1)", 5: "sign"}


def save(world: LocalWorld) -> list[dict[str, Any]]:
    """Every rank's state, on its way through bytes as in a file."""
    return [checkpoint.loads(checkpoint.dumps(state.save(plan, rank, world.ranks, np.copy)))
            for rank, plan in enumerate(world.plans)]


def load(world: LocalWorld, states: list[dict[str, Any]]) -> None:
    for rank, (plan, each) in enumerate(zip(world.plans, states, strict=True)):
        state.restore(each, plan, rank, world.ranks, np.copyto)


def train(world: LocalWorld, steps: range) -> list[Grads]:
    return [world.step(values.gradients(step, world.ranks, SHAPES)) for step in steps]


def same(one: list[Grads], other: list[Grads]) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for x, y in zip(one, other, strict=True)
               for a, b in zip(x, y, strict=True) for name in a)


@pytest.mark.parametrize(("spec", "exchange"), [*CARRIED, (STAGES, "auto")], ids=str)
def test_saved_and_restored_goes_on_as_if_uninterrupted(spec: Any, exchange: str) -> None:
    """Case K1 (d), bitwise: warm start, step count, stage, codebook and randomness."""
    straight, resumed = (LocalWorld(spec, SHAPES, 3, min_size=MIN_SIZE, exchange=exchange) for _ in range(2))
    train(straight, range(4))
    load(resumed, save(straight))
    assert same(train(resumed, range(4, 8)), train(straight, range(4, 8)))


def test_what_is_not_restored_shows() -> None:
    """The test above can fail: without any one array of the state the outputs differ."""
    for spec, name in (("topk(ratio=0.1)", "residual"), ("powersgd(rank=1)", "factor"),
                       ("uniform(bits=4, stochastic=True)", "step")):
        straight, resumed = (LocalWorld(spec, SHAPES, 2, min_size=MIN_SIZE) for _ in range(2))
        train(straight, range(3))
        states = save(straight)
        for each in states:
            each["tensors"]["weight"][name][:] = 0
        load(resumed, states)
        assert not same(train(resumed, range(3, 5)), train(straight, range(3, 5))), f"{name} of {spec}"


@pytest.mark.parametrize("spec", [*ALL, STAGES], ids=str)
def test_the_two_kinds_are_marked(spec: Any) -> None:
    """What is not listed under ``per_rank`` is the same on every rank; residuals are listed, and differ."""
    world = LocalWorld(spec, SHAPES, 2, min_size=MIN_SIZE)
    train(world, range(3))
    first, second = save(world)
    for name, arrays in first["tensors"].items():
        assert set(first["per_rank"][name]) == arrays.keys() & {"residual"}
        for key, array in arrays.items():
            same_bits = array.tobytes() == second["tensors"][name][key].tobytes()
            assert same_bits == (key != "residual" or not array.any())


def kept(world: LocalWorld, name: str) -> Any:
    """What counts as kept for the mean gradient: the mean residual, and the residuals of chunks' owners."""
    total = np.zeros(world.plans[0].slots[name].spec.numel)
    cuts = bounds(total.size, world.ranks)
    for plan, (begin, end) in zip(world.plans, cuts, strict=True):
        slot = plan.slots[name].state
        if "residual" in slot:
            total += slot["residual"].astype(np.float64) / world.ranks
        if OWNER in slot:
            total[begin:end] += slot[OWNER][: end - begin]
    return total


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize(("spec", "exchange"), [
    *((spec, "auto") for spec in LAST), (STAGES, "auto"), ("uniform(bits=2)", "two_stage"),
    ("powersgd(rank=1)", "two_stage"), ("topk(ratio=0.05)", "sparse_split")], ids=str)
def test_another_world_size_keeps_the_mean_of_the_residuals(spec: Any, exchange: str, before: int, after: int) -> None:
    """Case K1 (c): sum of outputs + what is kept = sum of mean gradients, across the change."""
    old, new = (LocalWorld(spec, SHAPES, ranks, min_size=MIN_SIZE, exchange=exchange) for ranks in (before, after))
    train(old, range(3))
    states = save(old)
    load(new, [state.resized(states, plan, rank) for rank, plan in enumerate(new.plans)])
    for name, slot in new.plans[0].slots.items():
        np.testing.assert_allclose(kept(new, name), kept(old, name), rtol=2e-7, atol=1e-30)
        for key, array in slot.state.items():
            if state.kind(new.plans[0], slot, key) == state.SHARED and exchange == "auto":
                assert array.tobytes() == old.plans[0].slots[name].state[key].tobytes()
    had = {name: kept(new, name) for name, slot in new.plans[0].slots.items() if slot.stages}
    out = train(new, range(3, 4))[0][0]
    given = values.gradients(3, after, SHAPES)
    for name, residual in had.items():
        want = residual + np.mean([g[name].ravel().astype(np.float64) for g in given], axis=0)
        got = out[name].ravel() + kept(new, name)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-2 if "fp16" in str(spec) else 1e-4)


def test_some_codecs_are_resized_with_a_residual() -> None:
    """The test above is not about zeros."""
    for spec, exchange in ((COMPRESSING[-1], "auto"), ("uniform(bits=2)", "two_stage")):
        world = LocalWorld(spec, SHAPES, 2, min_size=MIN_SIZE, exchange=exchange)
        train(world, range(2))
        assert np.abs(kept(world, "weight")).max() > 0.01
        assert exchange == "auto" or all(plan.slots["weight"].state[OWNER].any() for plan in world.plans)


DGC: dict[int, Any] = {0: "topk(ratio=0.2)", 2: "topk(ratio=0.05) + uniform(bits=8)"}
SGD = Momentum(0.9)


def dgc_world(ranks: int, exchange: str, steps: int = 0) -> LocalWorld:
    """A world under Deep Gradient Compression, trained for some steps."""
    world = LocalWorld(DGC, SHAPES, ranks, min_size=MIN_SIZE, exchange=exchange, dgc=True)
    for step in range(steps):
        world.step(values.gradients(step, ranks, SHAPES), sgd=SGD)
    return world


def velocity(plans: list[Plan], name: str, ranks: int) -> Any:
    return sum(plan.slots[name].state["momentum"].astype(np.float64) for plan in plans) / ranks


@pytest.mark.parametrize("exchange", ["gather", "two_stage", "sparse_split"])
def test_dgc_is_restored_bitwise_and_resized_by_the_rule(exchange: str) -> None:
    """Case K1 (c, d): velocity and accumulated velocity, step and stage."""
    straight, resumed = dgc_world(3, exchange, 3), dgc_world(3, exchange)
    states = save(straight)
    assert set(states[0]["per_rank"]["weight"]) >= {"residual", "momentum"}
    load(resumed, states)
    outs = [world.step(values.gradients(3, 3, SHAPES), sgd=SGD) for world in (resumed, straight)]
    assert same([outs[0]], [outs[1]])
    for after in (2, 4, 1):
        new = dgc_world(after, exchange)
        load(new, [state.resized(states, plan, rank) for rank, plan in enumerate(new.plans)])
        old = dgc_world(3, exchange)
        load(old, states)
        for name in (name for name, slot in new.plans[0].slots.items() if slot.stages):
            np.testing.assert_allclose(kept(new, name), kept(old, name), rtol=2e-7, atol=1e-30)
            before = velocity(old.plans, name, 3)
            assert np.abs(before).max() > 0.01
            np.testing.assert_allclose(velocity(new.plans, name, after), before, rtol=2e-7, atol=1e-30)
            assert int(new.plans[0].slots[name].state["step"][0]) == 3


class Meeting:
    """Ranks as threads: what they exchange in ``state.spread``."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.box = threading.Barrier(ranks, timeout=20), [np.zeros(0)] * ranks

    def gather(self, rank: int, array: Any) -> list[Any]:
        self.box[rank] = array
        self.barrier.wait()
        everyone = list(self.box)
        self.barrier.wait()
        return everyone

    def spread(self, rank: int, old: Plan, new: Plan, places: list[tuple[int, int]]) -> None:
        state.spread(old, new, places, rank, store=np.copyto,
                     broadcast=lambda array, root, name: self.gather(rank, array)[root],
                     add=lambda array, name: sum(self.gather(rank, array)))


@pytest.mark.parametrize("places", [[(0, 3), (2, 3)], [(1, 3), (0, 0), (0, 3), (2, 3)], [(2, 3), (0, 0), (0, 0)],
                                    [(1, 3)]], ids=["lost", "joined", "same number", "alone"])
@pytest.mark.parametrize("exchange", ["gather", "two_stage"])
def test_what_is_left_is_spread_over_those_that_are_there(exchange: str, places: list[tuple[int, int]]) -> None:
    """Elastic mode: everyone gets the same share, which counts as much as what the survivors kept."""
    old, ranks = dgc_world(3, exchange, 4), len(places)
    new = dgc_world(ranks, exchange)
    survivors = [old.plans[rank] for rank, n in places if n]
    meeting = Meeting(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(lambda rank: meeting.spread(rank, old.plans[places[rank][0]], new.plans[rank], places),
                      range(ranks)))
    for name in (name for name, slot in new.plans[0].slots.items() if slot.stages):
        shares = [plan.slots[name].state for plan in new.plans]
        for key in ("residual", "momentum"):
            assert all(share[key].tobytes() == shares[0][key].tobytes() for share in shares)
        np.testing.assert_allclose(shares[0]["momentum"], velocity(survivors, name, 3), rtol=1e-6, atol=1e-30)
        dead = LocalWorld(DGC, SHAPES, 3, min_size=MIN_SIZE, exchange=exchange, dgc=True)
        load(dead, save(old))
        for rank in {0, 1, 2} - {rank for rank, n in places if n}:
            for array in dead.plans[rank].slots[name].state.values():
                array[:] = 0
        np.testing.assert_allclose(kept(new, name), kept(dead, name), rtol=1e-6, atol=1e-7)
        assert all(int(share["step"][0]) == 4 for share in shares)
