"""Training through the stock optimizer: ranks agree, Sum is N x Average, nothing is lost."""

import pytest
import torch

import hvd_gradcomp.torch as gradcomp

from .world import CODECS, World, assert_equal_on_ranks, mean_over_ranks, randn


def train(hvd, spec, op, steps=40):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(5))
    rate = 0.3 if op == hvd.Average else 0.3 / hvd.size()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate), named_parameters=model.named_parameters(), op=op,
        compression=gradcomp.Compression(spec, named_parameters=model.named_parameters(), min_size=256))
    for step in range(steps):
        x = randn(32, 32, seed=step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1)).backward()
        optimizer.step()
    x = randn(500, 32, seed=9999, rank=0)
    loss = torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), float(loss.detach())


@pytest.mark.parametrize("spec", CODECS)
def test_ranks_end_equal_and_learn(hvd, spec):
    dense, dense_loss = train(hvd, "none", hvd.Average)
    weights, loss = train(hvd, spec, hvd.Average)
    assert_equal_on_ranks(weights)
    assert dense_loss < 1.9, "the dense run itself did not learn"
    assert loss < dense_loss + 0.25
    # Gloo adds the floats of more than two ranks in an order of its own, so two dense runs differ by rounding
    trace = float((weights - dense).abs().max())
    assert (trace < 1e-5) == (spec == "none"), f"a lossy codec must leave a trace, and none must not: {trace}"


@pytest.mark.parametrize("spec", CODECS)
def test_sum_is_ranks_times_average(hvd, spec):
    shape = (37, 29)
    grad = randn(*shape, seed=3)
    average = World(spec, {"w": shape}).reduce({"w": grad})["w"]
    total = World(spec, {"w": shape}, horovod={"op": hvd.Sum}).reduce({"w": grad})["w"]
    torch.testing.assert_close(total, hvd.size() * average, rtol=1e-6, atol=1e-6)
    assert_equal_on_ranks(total)


@pytest.mark.parametrize("spec", CODECS)
def test_nothing_is_lost(hvd, spec):
    """Identity T: sum of outputs + mean residual = sum of mean gradients, at every step."""
    shapes = {"odd": (33, 31), "vector": (1025,), "one": (1,), "scalar": ()}
    world = World(spec, shapes)
    outs = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    wants = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for step in range(6):
        def grad(name, rank, step=step):
            return randn(*shapes[name], seed=100 * step + len(name), rank=rank)
        out = world.reduce({name: grad(name, hvd.rank()) for name in shapes})
        for name in shapes:
            assert out[name].shape == torch.Size(shapes[name])
            assert_equal_on_ranks(out[name])
            outs[name] += out[name].double()
            wants[name] += mean_over_ranks(lambda rank, name=name: grad(name, rank))
            # fp16 sums in flight: what that rounds (N * 2**-11 a step) is in no rank's residual
            tolerance = 5e-3 * (step + 1) * hvd.size() if spec == "fp16" else 2e-6 * (step + 1)
            missing = (outs[name] + world.residual(name) - wants[name]).abs().max()
            assert missing <= tolerance, f"{name}: {missing} lost after step {step}"


def test_a_step_moves_the_optimizer(hvd):
    world = World("topk(ratio=0.5)", {"w": (4,)})
    world.optimizer.zero_grad()
    world.backward({"w": torch.tensor([4.0, 0.1, 0.2, 3.0])})
    world.optimizer.step()
    torch.testing.assert_close(world.params["w"].detach(), torch.tensor([-4.0, 0.0, 0.0, -3.0]))


def test_stages_change_and_keep_the_residual(hvd):
    """Case I1: all-reduce, all-gathers of changing size, another all-reduce, under the same parameter."""
    schedule = {0: "none", 1: "topk(ratio=0.1)", 3: "topk(ratio=0.02)", 5: "powersgd(rank=1)", 6: "none"}
    world = World(schedule, {"w": (20, 30)})
    total, want = torch.zeros(20, 30, dtype=torch.float64), torch.zeros(20, 30, dtype=torch.float64)
    for step in range(8):
        total += world.reduce({"w": randn(20, 30, seed=step)})["w"].double()
        want += mean_over_ranks(lambda rank, step=step: randn(20, 30, seed=step, rank=rank))
        torch.testing.assert_close(total + world.residual("w"), want, rtol=0, atol=1e-4)
    assert world.compression.stats()["tensors"]["w"]["codec"] == "none"


def test_policy_by_layer_shows_in_stats(hvd):
    world = World({"rules": [{"kind": "vector", "codec": "none"}, {"min_numel": 1000, "codec": "sign"}],
                   "default": "fp16"}, {"bias": (50,), "big": (40, 30), "small": (5, 6)})
    world.reduce({"bias": torch.ones(50), "big": torch.ones(40, 30), "small": torch.ones(5, 6)})
    tensors = world.compression.stats()["tensors"]
    assert tensors["big"]["codec"] == "sign(block=1024)" and tensors["small"]["codec"] == "fp16"
    assert tensors["bias"]["codec"] is None and "kind=vector" in tensors["bias"]["reason"]
