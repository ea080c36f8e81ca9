"""GradScaler: the recipe, the mistake that ends in an error, and autocast around backward."""

import pytest
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.errors import UsageError

from .world import World, assert_equal_on_ranks, mean_over_ranks, randn

SPECS = ["fp16", "uniform(bits=8)", "topk(ratio=0.2)", "powersgd(rank=2)"]


def scaled_world(spec):
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=2)
    return scaler, World(spec, {"w": (20, 10), "v": (50,)}, loss_scale=scaler)


def backward(scaler, world, grads):
    world.optimizer.zero_grad()
    scaler.scale(sum((world.params[name] * grad).sum() for name, grad in grads.items())).backward()


def recipe(scaler, world, clip=1e9):
    """As in docs/state.md. Gives the unscaled gradients."""
    world.optimizer.synchronize()
    scaler.unscale_(world.optimizer)
    grads = {name: param.grad.clone() for name, param in world.params.items()}
    torch.nn.utils.clip_grad_norm_(world.params.values(), clip)
    with world.optimizer.skip_synchronize():
        scaler.step(world.optimizer)
    scaler.update()
    return grads


@pytest.mark.parametrize("spec", SPECS)
def test_the_recipe_loses_nothing(hvd, spec):
    """Cases B1, B2 (a, b): while the scale grows and an inf halves it, identity T holds in unscaled units."""
    scaler, world = scaled_world(spec)
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in world.params.items()}
    want = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in world.params.items()}
    scales = []
    for step in range(5):
        def grad(name, rank, step=step):
            return 0.004 * randn(*world.params[name].shape, seed=step, rank=rank)
        grads = {name: grad(name, hvd.rank()) for name in world.params}
        bad = step == 2
        if bad and hvd.rank() == hvd.size() - 1:
            grads["v"][3] = float("inf")
        weights, states = [p.detach().clone() for p in world.params.values()], world.states()
        backward(scaler, world, grads)
        outs = recipe(scaler, world)
        scales.append(scaler.get_scale())
        assert bad != all(bool(torch.isfinite(out).all()) for out in outs.values())
        if bad:
            assert all(torch.equal(p.detach(), w) for p, w in zip(world.params.values(), weights, strict=True))
            assert all(torch.equal(array, states[name]) for name, array in world.states().items())
        else:
            for name, out in outs.items():
                total[name] += out.double()
                want[name] += mean_over_ranks(lambda rank, name=name: grad(name, rank))
    assert scales == [65536.0, 131072.0, 65536.0, 65536.0, 131072.0]
    for name, param in world.params.items():
        assert_equal_on_ranks(param)
        torch.testing.assert_close(total[name] + world.residual(name), want[name], rtol=0, atol=5e-5)


def test_clipping_sees_unscaled_gradients(hvd):
    scaler, world = scaled_world("uniform(bits=8)")
    backward(scaler, world, {"w": torch.full((20, 10), 0.003), "v": torch.zeros(50)})
    recipe(scaler, world, clip=0.01)
    norm = torch.linalg.vector_norm(world.params["w"].detach())
    torch.testing.assert_close(norm, torch.tensor(0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("wrapper", ["stock", "ours"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "an inf on the last rank"])
def test_a_bare_scaler_step_is_an_error_on_every_rank(hvd, wrapper, bad):
    """Case B2 (c): on stock Horovod without compression the ranks end with different weights, and nothing says so.
    A rank whose own gradients are finite unscales before the reduction is done; one that found an inf skips it."""
    scaler = torch.amp.GradScaler("cpu")
    param = torch.nn.Parameter(torch.zeros(50))
    wrap = gradcomp.DistributedOptimizer if wrapper == "ours" else hvd.DistributedOptimizer
    optimizer = wrap(torch.optim.SGD([param], lr=1.0), named_parameters=[("w", param)],
                     compression=gradcomp.Compression("topk(ratio=0.1)", [("w", param)], min_size=0,
                                                      loss_scale=scaler))
    grad = randn(50, seed=1)
    skips = bad and hvd.rank() == hvd.size() - 1
    if skips:
        grad[3] = float("inf")
    scaler.scale((param * grad).sum()).backward()
    says = "zero_grad" if skips else r"synchronize\(\) before clipping, unscaling"
    with pytest.raises(AssertionError if skips else UsageError, match=says):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.equal(param.detach(), torch.zeros(50)), "no rank has moved"


@pytest.mark.parametrize("spec", [*SPECS, "svd(rank=2)", "tt(rank=2)"])
def test_autocast_around_backward_changes_no_bit(hvd, spec):
    """Case D1, for float32 parameters."""
    inside, outside = (World(spec, {"w": (40, 30)}) for _ in range(2))
    for step in range(2):
        grads = {"w": randn(40, 30, seed=step)}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = inside.reduce(grads)["w"]
        want = outside.reduce(grads)["w"]
        if hvd.size() > 2 and spec in ("fp16", "powersgd(rank=2)"):  # Gloo adds floats in an order of its own
            torch.testing.assert_close(got, want, rtol=0, atol=2e-3)
        else:
            assert torch.equal(got, want)


def test_half_precision_models_keep_float32_residuals(hvd):
    """Case D3: 256 and ten times 1 make 266, which neither bfloat16 nor float16 could hold as a sum."""
    for dtype in (torch.bfloat16, torch.float16):
        world = World("topk(ratio=0.5)", {"w": torch.zeros(2, dtype=dtype)})
        for step in range(11):
            grad = torch.tensor([256.0 if step == 0 else 1.0, 4096.0], dtype=dtype)
            out = world.reduce({"w": grad})["w"]
            assert out.dtype == dtype
        assert world.compression.plan.slots["w"].state["residual"].tolist() == [266.0, 0.0]
