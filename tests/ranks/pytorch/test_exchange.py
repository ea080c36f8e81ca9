"""Exchanges in chunks on real ranks, and everything at once."""

import os
import random

import pytest
import torch

from hvd_gradcomp.collectives.hvd_torch import in_turn
from hvd_gradcomp.errors import SpecError, UsageError
from hvd_gradcomp.exchange.base import Commit, Send

from .world import World, assert_equal_on_ranks, mean_over_ranks, randn

IN_CHUNKS = [("uniform(bits=8)", "two_stage"), ("sign", "two_stage"), ("powersgd(rank=2)", "two_stage"),
             ("fp16", "two_stage"), ("uniform(bits=4)", "sum"), ("ternary", "sum"),
             ("topk(ratio=0.05)", "sparse_split"), ("topk(ratio=0.1) + uniform(bits=8)", "sparse_split")]
SHAPES = {"matrix": (57, 31), "odd": (1025,), "tiny": (2,), "scalar": ()}

STEPS = int(os.environ.get("HVD_GRADCOMP_STRESS_STEPS", "6"))
"""Set it to 200 for the whole stress test."""


def assert_nothing_is_lost(world, atol=1e-4):
    """In three steps of tensors of SHAPES: outputs and what is kept are the mean gradients, on ranks of equal bits."""
    received = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(3):
        outs = world.reduce({name: randn(*shape, seed=step) for name, shape in SHAPES.items()})
        for name, out in outs.items():
            assert_equal_on_ranks(out)
            received[name] += out.double()
    for name, shape in SHAPES.items():
        want = mean_over_ranks(lambda rank, shape=shape: sum(randn(*shape, seed=step, rank=rank) for step in range(3)))
        torch.testing.assert_close(received[name] + world.residual(name), want, rtol=0, atol=atol)


@pytest.mark.parametrize(("spec", "exchange"), IN_CHUNKS)
def test_nothing_is_lost_and_ranks_agree(hvd, spec, exchange):
    world = World(spec, SHAPES, exchange=exchange)
    assert_nothing_is_lost(world)


def test_restored_state_goes_on_bit_for_bit(hvd):
    def world():
        return World("uniform(bits=4, stochastic=True)", {"w": (41, 30)}, exchange="two_stage")

    first, second = world(), world()
    for step in range(2):
        first.reduce({"w": randn(41, 30, seed=step)})
    saved = first.compression.state_dict()
    assert saved["tensors"]["w"]["owner_residual"].any()
    second.compression.load_state_dict(saved)
    for step in range(2, 4):
        one, other = (each.reduce({"w": randn(41, 30, seed=step)})["w"] for each in (first, second))
        assert torch.equal(one, other)


def test_a_void_step_moves_no_state(hvd):
    world = World({"a": "sign", "b": "topk(ratio=0.1)"}, {"a": (300,), "b": (300,)},
                  exchange={"a": "two_stage", "b": "sparse_split"})
    world.reduce({name: randn(300, seed=0) for name in "ab"})
    before, grads = world.states(), {name: randn(300, seed=1) for name in "ab"}
    if hvd.rank() == 0:
        grads["a"][17] = float("nan")
    assert all(out.isnan().all() for out in world.reduce(grads).values())
    assert all(torch.equal(array, before[name]) for name, array in world.states().items())


def test_a_sparse_gradient_does_not_hold_up_its_bucket(hvd):
    embedding = torch.nn.Embedding(50, 8, sparse=True)
    world = World("uniform(bits=8)", {"a": (300,), "b": embedding.weight.detach(), "c": (300,)}, exchange="two_stage")
    world.optimizer.zero_grad()
    row = torch.nn.functional.embedding(torch.tensor([3]), world.params["b"], sparse=True)
    (row.sum() + world.params["a"].sum() + 2 * world.params["c"].sum()).backward()
    world.optimizer.synchronize()
    torch.testing.assert_close(world.params["a"].grad, torch.ones(300))
    torch.testing.assert_close(world.params["c"].grad, torch.full((300,), 2.0))


def test_mixed_codecs_and_exchanges_in_any_order(hvd):
    """60 tensors, whose gradients come in another order on each rank, or on some ranks not at all."""
    kinds = {"two": ("uniform(bits=8)", "two_stage"), "sign": ("sign", "two_stage"),
             "split": ("topk(ratio=0.05)", "sparse_split"), "gather": ("topk(ratio=0.1) + uniform(bits=8)", "gather"),
             "sum": ("fp16", "sum"), "low": ("powersgd(rank=1)", "auto"), "rand": ("randomk(ratio=0.2)", "sum"),
             "lanes": ("qsgd(levels=7)", "sum"),
             "hosts": ("sign", f"hierarchical(local={1 + (hvd.size() == 4)})"),
             "dense": ("none", "auto"), "plan": ({0: "none", 2: "topk(ratio=0.2)", 4: "sign"}, "auto")}
    names = [f"{kind}{i}" for i in range(7) for kind in kinds][:60]
    shapes = {name: (1 + 37 * i % 31, 1 + 53 * i % 41) for i, name in enumerate(names)}
    world = World({f"{kind}*": codec for kind, (codec, _) in kinds.items()}, shapes,
                  exchange={f"{kind}*": exchange for kind, (_, exchange) in kinds.items()})
    order = random.Random(hvd.rank())

    def grad(name, step, rank):
        seed = 100 * step + names.index(name)
        return randn(*shapes[name], seed=seed, rank=rank) * float((seed + rank) % 5 > 0)

    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for step in range(STEPS):
        given = [name for i, name in enumerate(names) if (100 * step + i + hvd.rank()) % 5 > 0]
        order.shuffle(given)
        out = world.reduce({name: grad(name, step, hvd.rank()) for name in given})
        for name in names:
            sums[name] += out[name].double()
    assert_equal_on_ranks(torch.cat([total.view(-1) for total in sums.values()]))
    for name in names:
        want = mean_over_ranks(lambda rank, name=name: sum(grad(name, step, rank) for step in range(STEPS)))
        atol = 2e-2 * STEPS**0.5 if name.startswith("sum") else 1e-4 * STEPS  # halves round when they are added
        torch.testing.assert_close(sums[name] + world.residual(name), want, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("spec", ["uniform(bits=8)", "fp16", "topk(ratio=0.05) + uniform(bits=8)", "sign"])
def test_hosts_lose_nothing_and_agree(hvd, spec):
    """Declared hosts of two ranks; with two or three ranks in all there is one host or no way to make any."""
    if hvd.size() == 3:
        with pytest.raises(SpecError, match="3 ranks are no hosts of 2 each"):
            World(spec, SHAPES, exchange="hierarchical(local=2)")
        return
    world = World(spec, SHAPES, exchange="hierarchical(local=2)")
    assert_nothing_is_lost(world, atol=2e-2 if spec == "fp16" else 1e-4)
    shown = world.compression.stats()["tensors"]["matrix"]["exchange"]
    assert (shown == "hierarchical(local=2)") == (hvd.size() > 2)


def test_the_hosts_of_this_machine(hvd):
    """One, so nothing is to be had between hosts."""
    world = World("sign", {"w": (300,)}, exchange="hierarchical")
    assert torch.isfinite(world.reduce({"w": randn(300, seed=0)})["w"]).all()
    assert world.compression.stats()["tensors"]["w"]["exchange"] == "gather"


PIECES = {"w": (50, 100), "b": (40,)}


class InPieces:
    """A tensor of 5,000 elements in five pieces, and the same as a whole."""

    def __init__(self, spec, exchange="auto"):
        self.cut = World(spec, PIECES, exchange=exchange, large=4000)
        self.whole = World(spec, PIECES, exchange=exchange, large=None)
        assert len(self.cut.compression.plan.slots["w"].cuts) == 5
        assert not self.cut.compression.plan.slots["b"].cuts

    def reduce(self, seed, both=True):
        grads = {name: randn(*shape, seed=seed) for name, shape in PIECES.items()}
        return [world.reduce(grads) for world in (self.cut, self.whole)[: 1 + both]]


@pytest.mark.parametrize(("spec", "exchange"), [
    ("uniform(bits=8)", "gather"), ("sign", "gather"), ("uniform(bits=4, block=64)", "gather"), ("fp16", "gather"),
    ("log(bits=8)", "gather"), ("bf16", "gather")])
def test_pieces_of_whole_blocks_are_the_whole(hvd, spec, exchange):
    both = InPieces(spec, exchange)
    for step in range(3):
        cut, whole = both.reduce(step)
        for name in PIECES:
            assert torch.equal(cut[name], whole[name])
    for name, array in both.cut.states().items():
        assert torch.equal(array, both.whole.states()[name])


@pytest.mark.parametrize(("spec", "exchange"), [
    ("topk(ratio=0.05)", "gather"), ("topk(ratio=0.05) + uniform(bits=8)", "sparse_split"), ("fp16", "sum"),
    ("uniform(bits=8)", "two_stage"), ("randomk(ratio=0.1)", "sum"), ("uniform(bits=3, stochastic=True)", "gather"),
    ("ternary", "sum")])
def test_pieces_lose_nothing_and_agree(hvd, spec, exchange):
    both = InPieces(spec, exchange)
    received = torch.zeros(50, 100, dtype=torch.float64)
    for step in range(3):
        [out] = both.reduce(step, both=False)
        assert_equal_on_ranks(out["w"])
        received += out["w"].double()
    want = mean_over_ranks(lambda rank: sum(randn(50, 100, seed=step, rank=rank) for step in range(3)))
    torch.testing.assert_close(received + both.cut.residual("w"), want, rtol=0,
                               atol=2e-2 if spec == "fp16" else 1e-4)
    state = both.cut.compression.plan.slots["w"].state
    assert "owner_residual" not in state and state.get("step", torch.tensor([3])).item() == 3
    shown = both.cut.compression.stats()["tensors"]["w"]
    assert shown["exchange"] == exchange and shown["steps"] == 3


def test_a_void_step_moves_nothing_of_any_piece(hvd):
    both = InPieces("uniform(bits=4, stochastic=True)", "gather")
    both.reduce(0)
    before = both.cut.states()
    grads = {name: randn(*shape, seed=1) for name, shape in PIECES.items()}
    if hvd.rank() == hvd.size() - 1:
        grads["b"][3] = float("inf")
    assert all(out.isnan().all() for out in both.cut.reduce(grads).values())
    assert all(torch.equal(array, before[name]) for name, array in both.cut.states().items())


def test_pieces_restored_go_on_bit_for_bit(hvd):
    first, second = (InPieces("uniform(bits=4, stochastic=True)", "gather") for _ in range(2))
    first.reduce(0, both=False)
    second.cut.compression.load_state_dict(first.cut.compression.state_dict())
    assert torch.equal(first.reduce(1, both=False)[0]["w"], second.reduce(1, both=False)[0]["w"])


def test_a_changed_large_gradient_is_refused(hvd):
    world = World("sign", {"w": (5000,)}, large=4000)
    world.backward({"w": randn(5000, seed=0)})
    world.params["w"].grad.zero_()
    with pytest.raises(UsageError, match="was changed after backward"):
        world.optimizer.synchronize()


def test_the_next_pieces_are_begun_before_one_is_decoded(hvd):
    events = []

    def flow(i):
        events.append(f"begin {i}")
        total = yield Send({"x": torch.full((4,), float(i))}, "sum")
        ok = yield Commit()
        events.append(f"end {i}")
        return total["x"] * ok

    flows = ((f"piece.{i % 4}", flow(i)) for i in range(5))
    means = list(in_turn(flows, {None: hvd.global_process_set}, torch.ones(1)))
    assert [mean[0].item() for mean in means] == [float(hvd.size() * i) for i in range(5)]
    assert events[:5] == ["begin 0", "begin 1", "begin 2", "end 0", "begin 3"]
    assert events[5:] == ["end 1", "begin 4", "end 2", "end 3", "end 4"]
