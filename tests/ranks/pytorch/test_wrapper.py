"""``gradcomp.DistributedOptimizer``: Horovod's optimizer without its faults; state; statistics."""

import copy

import pytest
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.errors import StateError, UsageError

from .world import LOSSY, World, randn


def wrapped(spec="uniform(bits=8)", **kwargs):
    param = torch.nn.Parameter(torch.zeros(100))
    base = torch.optim.SGD([param], lr=1.0)
    return param, base, gradcomp.DistributedOptimizer(base, [("w", param)], spec, min_size=0, **kwargs)


def test_zero_grad_takes_set_to_none(hvd):
    """Case J4."""
    param, base, optimizer = wrapped()
    (param.sum()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(param.grad, torch.zeros(100))
    optimizer.zero_grad()
    assert param.grad is None
    assert isinstance(optimizer, type(base))


def test_step_closure_reduces_what_the_closure_computes(hvd):
    param, _, optimizer = wrapped()

    def closure():
        optimizer.zero_grad()
        loss = (param * float(hvd.rank())).sum() + 7.0
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 7.0
    torch.testing.assert_close(param.detach(), torch.full((100,), -(hvd.size() - 1) / 2))


def test_step_hooks_fire_once(hvd):
    param, _, optimizer = wrapped()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    param.sum().backward()
    optimizer.step()
    assert calls == ["pre", "post"]


def test_scheduler_and_state_dict(hvd):
    param, _, optimizer = wrapped()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    param.sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert copy.deepcopy(optimizer.state_dict())["param_groups"][0]["lr"] == 0.5


def test_a_group_added_later_is_refused(hvd):
    """Case I3: its gradients would silently stay local."""
    _, _, optimizer = wrapped()
    with pytest.raises(UsageError, match="before wrapping"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def test_names_may_be_omitted_or_come_from_a_generator(hvd):
    """Case I3: two groups, no names."""
    params = [torch.nn.Parameter(torch.zeros(50)) for _ in range(4)]
    base = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=1.0)
    optimizer = gradcomp.DistributedOptimizer(base, compression="sign", min_size=0)
    sum((p * (i + 1)).sum() for i, p in enumerate(params)).backward()
    optimizer.step()
    for p, moved in zip(params, (-1.0, -2.0, -1.5, -2.0), strict=True):
        torch.testing.assert_close(p.detach(), torch.full((50,), moved))


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_drop_in_names(hvd, name):
    param = torch.nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), named_parameters=[("w", param)],
                                         compression=getattr(gradcomp.Compression, name))
    (param * 2.0).sum().backward()
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((10,), -2.0))


def test_broadcasts_after_wrapping_disturb_nothing(hvd):
    """Case K1 (a)."""
    world = World("topk(ratio=0.1)", {"w": (50,)})
    world.reduce({"w": randn(50, seed=1)})
    before = world.states()
    hvd.broadcast_parameters(world.params, root_rank=0)
    hvd.broadcast_optimizer_state(world.optimizer, root_rank=0)
    assert torch.equal(world.params["w"].detach(), torch.zeros(50))
    assert all(torch.equal(array, before[name]) for name, array in world.states().items())


@pytest.mark.parametrize("spec", LOSSY)
def test_saved_and_restored_equals_uninterrupted(hvd, spec):
    """Case K1 (d), bitwise."""
    shapes = {"w": (33, 31), "v": (100,)}
    straight, resumed = World(spec, shapes), World(spec, shapes)
    for step in range(3):
        straight.reduce({name: randn(*shape, seed=step) for name, shape in shapes.items()})
    saved = copy.deepcopy(straight.compression.state_dict())
    resumed.compression.load_state_dict(saved)
    for step in range(3, 6):
        grads = {name: randn(*shape, seed=step) for name, shape in shapes.items()}
        out, want = resumed.reduce(grads), straight.reduce(grads)
        for name in shapes:
            if spec == "fp16" and hvd.size() > 2:  # Gloo adds floats in an order of its own
                torch.testing.assert_close(out[name], want[name], rtol=0, atol=5e-3)
            else:
                assert torch.equal(out[name], want[name])


def test_state_of_another_rank_or_configuration_is_refused(hvd):
    """Case K1 (b): rank 0's residual must not become everyone's. Nothing is changed by a refusal."""
    world = World("topk(ratio=0.1)", {"w": (50,)})
    world.reduce({"w": randn(50, seed=1)})
    before = world.states()
    saved = world.compression.state_dict()
    saved["rank"] = (hvd.rank() + 1) % hvd.size()
    with pytest.raises(StateError, match="each rank saves and loads its own"):
        world.compression.load_state_dict(saved)
    with pytest.raises(StateError, match="another configuration: codec"):
        world.compression.load_state_dict(World("sign", {"w": (50,)}).compression.state_dict())
    with pytest.raises(StateError, match=r"not what Compression\.state_dict"):
        world.compression.load_state_dict({"model": {}})
    assert all(torch.equal(array, before[name]) for name, array in world.states().items())


def test_stats_count_what_travels(hvd):
    world = World("uniform(bits=8)", {"big": (1024,), "small": (10,)}, min_size=100)
    for step in range(3):
        world.reduce({"big": randn(1024, seed=step), "small": randn(10, seed=step)})
    stats = world.compression.stats()
    n = hvd.size()
    payload = 1024 + 8
    ring = 2 * (n - 1) / n
    token_and_flag = 2 + (n - 1).bit_length() + 1
    per_step = (n - 1) * payload + ring * 4 * 10 + ring * 4 * token_and_flag
    assert stats["steps"] == 3
    assert stats["wire_bytes_received"] == pytest.approx(3 * per_step, abs=1)
    assert stats["dense_bytes"] == pytest.approx(3 * ring * 4 * 1034, abs=1)
    assert stats["ratio"] == pytest.approx(stats["dense_bytes"] / stats["wire_bytes_received"], rel=1e-3)
    assert stats["tensors"]["big"]["codec"] == "uniform(bits=8)"
    assert stats["tensors"]["big"]["payload_bytes"] == payload
    assert stats["tensors"]["big"]["residual_norm"] > 0
    assert "small: 10 elements" in stats["tensors"]["small"]["reason"]


def test_other_collectives_are_untouched(hvd):
    """Case I9."""
    World("sign", {"w": (50,)}).reduce({"w": randn(50, seed=1)})
    value = hvd.allreduce(torch.tensor([1234.567]), name="metric")
    torch.testing.assert_close(value, torch.tensor([1234.567]), rtol=1e-6, atol=0)
