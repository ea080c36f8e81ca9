"""Exchanges in chunks on real ranks, and everything at once."""

import os
import random

import pytest
import torch

from hvd_gradcomp.errors import SpecError

from .world import World, assert_equal_on_ranks, mean_over_ranks, randn

IN_CHUNKS = [("uniform(bits=8)", "two_stage"), ("sign", "two_stage"), ("powersgd(rank=2)", "two_stage"),
             ("fp16", "two_stage"), ("topk(ratio=0.05)", "sparse_split"),
             ("topk(ratio=0.1) + uniform(bits=8)", "sparse_split")]
SHAPES = {"matrix": (57, 31), "odd": (1025,), "tiny": (2,), "scalar": ()}

STEPS = int(os.environ.get("HVD_GRADCOMP_STRESS_STEPS", "6"))
"""Set it to 200 for the whole stress test."""


@pytest.mark.parametrize(("spec", "exchange"), IN_CHUNKS)
def test_nothing_is_lost_and_ranks_agree(hvd, spec, exchange):
    world = World(spec, SHAPES, exchange=exchange)
    received = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(3):
        outs = world.reduce({name: randn(*shape, seed=step) for name, shape in SHAPES.items()})
        for name, out in outs.items():
            assert_equal_on_ranks(out)
            received[name] += out.double()
    for name, shape in SHAPES.items():
        want = mean_over_ranks(lambda rank, shape=shape: sum(randn(*shape, seed=step, rank=rank) for step in range(3)))
        torch.testing.assert_close(received[name] + world.residual(name), want, rtol=0, atol=1e-4)


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
    received = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(3):
        outs = world.reduce({name: randn(*shape, seed=step) for name, shape in SHAPES.items()})
        for name, out in outs.items():
            assert_equal_on_ranks(out)
            received[name] += out.double()
    for name, shape in SHAPES.items():
        want = mean_over_ranks(lambda rank, shape=shape: sum(randn(*shape, seed=step, rank=rank) for step in range(3)))
        torch.testing.assert_close(received[name] + world.residual(name), want, rtol=0,
                                   atol=2e-2 if spec == "fp16" else 1e-4)
    shown = world.compression.stats()["tensors"]["matrix"]["exchange"]
    assert (shown == "hierarchical(local=2)") == (hvd.size() > 2)


def test_the_hosts_of_this_machine(hvd):
    """One, so nothing is to be had between hosts."""
    world = World("sign", {"w": (300,)}, exchange="hierarchical")
    assert torch.isfinite(world.reduce({"w": randn(300, seed=0)})["w"]).all()
    assert world.compression.stats()["tensors"]["w"]["exchange"] == "gather"
