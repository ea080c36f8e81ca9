"""Cases that broke somebody's training elsewhere, as far as no other file here has them."""

import time

import pytest
import torch

import hvd_gradcomp.torch as gradcomp

from .world import World, assert_equal_on_ranks, randn


def test_one_rank_has_only_padding(hvd):
    """Case C2: its sparse gradient has no entry at all."""
    embedding = torch.nn.Embedding(20, 4, padding_idx=0, sparse=True)
    named = [("embedding", embedding.weight)]
    optimizer = gradcomp.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), named,
                                              "topk(ratio=0.1)", min_size=0)
    last = hvd.size() - 1
    for _ in range(2):
        optimizer.zero_grad()
        embedding(torch.tensor([0, 0] if hvd.rank() == last else [3, 5])).sum().backward()
        optimizer.synchronize()
        out = embedding.weight.grad.to_dense()
        want = torch.zeros(20, 4)
        want[[3, 5]] = last / hvd.size()
        torch.testing.assert_close(out, want)
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize("exchange", ["gather", "sparse_split"])
def test_ranks_that_have_nothing_to_send(hvd, exchange):
    """Case C2: zeros on all but one rank, then on all."""
    world = World("topk(ratio=0.1)", {"w": (60,)}, exchange=exchange)
    grad = torch.zeros(60)
    grad[7] = float(hvd.rank() == 0)
    torch.testing.assert_close(world.reduce({"w": grad})["w"][7], torch.tensor(1 / hvd.size()))
    assert not world.reduce({"w": torch.zeros(60)})["w"].any()
    assert not world.states()["w/residual"].any()


def test_what_is_kept_stays_with_the_parameter(hvd):
    """Case G3: its data may be replaced; the state neither moves nor multiplies."""
    world = World("topk(ratio=0.1)", {"w": (50,)})
    total = torch.zeros(50)
    for step in range(4):
        total += world.reduce({"w": randn(50, seed=step)})["w"]
        world.params["w"].data = world.params["w"].data.clone()
        assert world.states().keys() == {"w/residual"}
    want = sum(randn(50, seed=step, rank=rank) for step in range(4) for rank in range(hvd.size())) / hvd.size()
    torch.testing.assert_close(total + world.residual("w"), want.double(), rtol=0, atol=1e-5, check_dtype=False)


def test_what_is_kept_is_a_gradient_not_an_update(hvd):
    """Case G6 (b): [1, 0.9], the largest entry only, at the learning rates 1 and 0.1: what was kept in the first step
    is applied with the second step's rate."""
    world = World("topk(ratio=0.5)", {"w": (2,)})
    for rate in (1.0, 0.1):
        world.optimizer.param_groups[0]["lr"] = rate
        world.reduce({"w": torch.tensor([1.0, 0.9])})
        with world.optimizer.skip_synchronize():
            world.optimizer.step()
    torch.testing.assert_close(world.params["w"].detach(), torch.tensor([-1.0, -0.18]))


def test_the_optimizer_gets_zeros_where_nothing_was_sent(hvd):
    """Case H4 for codecs without DGC: momentum 0.5, one coordinate gets 1, nothing, 1."""
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = gradcomp.DistributedOptimizer(torch.optim.SGD([param], lr=1.0, momentum=0.5), [("w", param)],
                                              "topk(ratio=0.5)", min_size=0)
    for grad in (1.0, 0.0, 1.0):
        optimizer.zero_grad()
        (param * torch.tensor([grad, 0.0])).sum().backward()
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor([-2.75, 0.0]))


def test_timing_changes_no_bit(hvd):
    """Case M4: what is gathered is decided by local data and added in rank order, whenever it comes."""
    outs = []
    for run in range(2):
        world = World({"a": "topk(ratio=0.05)", "b": "uniform(bits=4, stochastic=True)", "c": "sign"},
                      {"a": (300,), "b": (300,), "c": (300,)}, exchange="gather", seed=3)
        for step in range(4):
            time.sleep(0.02 * ((hvd.rank() + run + step) % 3))
            out = world.reduce({name: randn(300, seed=10 * step + i) for i, name in enumerate("abc")})
        outs.append(torch.cat([out[name] for name in "abc"]))
    assert torch.equal(*outs)
    assert_equal_on_ranks(outs[0])
