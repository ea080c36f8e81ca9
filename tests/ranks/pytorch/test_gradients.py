"""Gradients of every dtype, layout and value; steps that do not count."""

import pytest
import torch

from hvd_gradcomp.errors import UsageError

from .world import LOSSY, World, assert_equal_on_ranks, mean_over_ranks, randn


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["none", "fp16", "uniform(bits=8)", "topk(ratio=0.5)"])
def test_dtypes(hvd, spec, dtype):
    """Cases D2, D3: the mean in the parameter's dtype, with a float32 residual."""
    world = World(spec, {"w": torch.zeros(6, 5, dtype=dtype)})
    grad = torch.full((6, 5), 1.0 + 2.0 * hvd.rank(), dtype=dtype)
    out = world.reduce({"w": grad})["w"]
    assert out.dtype == dtype
    total = out.double() + world.residual("w")
    torch.testing.assert_close(total, torch.full((6, 5), float(hvd.size()), dtype=torch.float64), rtol=2e-3, atol=0)
    for array in world.compression.plan.slots["w"].state.values():
        assert array.dtype in (torch.float32, torch.int32)


def test_complex_is_left_to_horovod(hvd):
    """Case D4."""
    world = World("topk(ratio=0.1)", {"w": torch.zeros(4, dtype=torch.complex64)})
    world.optimizer.zero_grad()
    value = torch.tensor(1 + 2j if hvd.rank() == 0 else 3 - 4j).expand(4)
    torch.view_as_real(world.params["w"] * value.conj()).select(-1, 0).sum().backward()
    world.optimizer.synchronize()
    out = world.params["w"].grad
    want = mean_over_ranks(lambda rank: torch.view_as_real(torch.full((4,), 1 + 2j if rank == 0 else 3 - 4j)))
    torch.testing.assert_close(torch.view_as_real(out).double(), want)
    assert world.compression.stats()["tensors"]["w"]["reason"] == "complex dtype"


@pytest.mark.parametrize("spec", ["none", "uniform(bits=8)", "topk(ratio=0.1)"])
def test_scalars_and_empty_tensors(hvd, spec):
    """Cases C2, C3."""
    world = World(spec, {"temperature": (), "empty": (0, 5), "one": (1, 1)})
    world.optimizer.zero_grad()
    world.backward({"temperature": torch.tensor(1.0 + 2.0 * hvd.rank()), "empty": torch.zeros(0, 5),
                    "one": torch.ones(1, 1)})
    world.optimizer.synchronize()
    assert world.params["temperature"].grad.shape == ()
    assert float(world.params["temperature"].grad) == pytest.approx(hvd.size())
    assert world.params["empty"].grad.shape == (0, 5)
    assert float(world.params["one"].grad) == 1.0


@pytest.mark.parametrize("spec", ["uniform(bits=8)", "topk(ratio=0.5)", "sign"])
def test_channels_last_on_one_rank(hvd, spec):
    """Case F1: elements meet by logical index, strides and the tensor object stay."""
    weight = torch.zeros(2, 3, 2, 2)
    if hvd.rank() == 0:
        weight = weight.to(memory_format=torch.channels_last)
    world = World(spec, {"w": weight})
    values = torch.arange(24.0).view(2, 3, 2, 2)
    param = world.params["w"]
    param.grad = values.to(memory_format=torch.channels_last) if hvd.rank() == 0 else values.clone()
    grad = param.grad
    world.optimizer.synchronize()
    assert param.grad is grad and param.grad.stride() == weight.stride()
    torch.testing.assert_close(param.grad.double() + world.residual("w"), values.double(), rtol=0, atol=1e-5)
    assert_equal_on_ranks(param.grad)


def test_gradient_that_is_a_slice_of_a_buffer(hvd):
    world = World("uniform(bits=8)", {"w": (10,)})
    buffer = torch.full((30,), 5.0)
    world.params["w"].grad = buffer[10:20]
    world.optimizer.synchronize()
    torch.testing.assert_close(world.params["w"].grad, torch.full((10,), 5.0))
    assert torch.equal(buffer[:10], torch.full((10,), 5.0)) and torch.equal(buffer[20:], torch.full((10,), 5.0))


def test_two_gradients_in_one_storage(hvd):
    """torch gives both operands of a sum of views one storage; neither may see the other's mean."""
    world = World("topk(ratio=0.25)", {"a": (4,), "b": (2, 2)})
    world.optimizer.zero_grad()
    values = torch.tensor([4.0, 1.0, 2.0, 3.0])
    ((world.params["a"].view(-1) + world.params["b"].view(-1)) * values).sum().backward()
    world.optimizer.synchronize()
    for name in "ab":
        assert torch.equal(world.params[name].grad.view(-1), torch.tensor([4.0, 0.0, 0.0, 0.0]))
        assert torch.equal(world.compression.plan.slots[name].state["residual"], torch.tensor([0.0, 1.0, 2.0, 3.0]))


def test_expanded_gradient(hvd):
    world = World("uniform(bits=8)", {"w": (4, 3)})
    world.params["w"].grad = torch.tensor(2.0).expand(4, 3)
    world.optimizer.synchronize()
    assert torch.equal(world.params["w"].grad, torch.full((4, 3), 2.0))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["a", "small"])
@pytest.mark.parametrize("spec", LOSSY)
def test_a_bad_value_on_one_rank_voids_the_step_everywhere(hvd, spec, where, bad):
    """Cases B1, B2: all outputs are NaN on all ranks, no state moves, the next step is right."""
    shapes = {"a": (20, 20), "b": (300,), "small": (3,)}
    world, clean = World(spec, shapes, min_size=10), World(spec, shapes, min_size=10)
    for step in range(2):
        grads = {name: randn(*shape, seed=step) for name, shape in shapes.items()}
        world.reduce(grads)
        clean.reduce(grads)
    before = world.states()
    grads = {name: randn(*shape, seed=50) for name, shape in shapes.items()}
    if hvd.rank() == hvd.size() - 1:
        grads[where].view(-1)[1] = bad
    for name, out in world.reduce(grads).items():
        assert torch.isnan(out).all(), f"{name} hides the bad value"
    for name, array in world.states().items():
        assert torch.equal(array, before[name]), f"{name} moved in a void step"
    grads = {name: randn(*shape, seed=60) for name, shape in shapes.items()}
    out, want = world.reduce(grads), clean.reduce(grads)
    for name in shapes:
        if spec == "fp16":  # float sums may differ from run to run over Gloo with more than two ranks
            torch.testing.assert_close(out[name], want[name], rtol=0, atol=5e-3)
        elif name != "small":
            assert torch.equal(out[name], want[name])


def test_a_bad_value_in_a_sparse_gradient_voids_the_step(hvd):
    embedding, weight = torch.nn.Embedding(10, 4, sparse=True), torch.nn.Parameter(torch.zeros(64))
    import hvd_gradcomp.torch as gradcomp

    named = [("e", embedding.weight), ("w", weight)]
    compression = gradcomp.Compression("sign", named, min_size=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([embedding.weight, weight], lr=1.0), named_parameters=named,
                                         compression=compression)
    factor = float("nan") if hvd.rank() == 0 else 1.0
    ((embedding(torch.tensor([1])) * factor).sum() + weight.sum()).backward()
    optimizer.synchronize()
    assert torch.isnan(weight.grad).all()
    assert torch.isnan(embedding.weight.grad.to_dense()).any()
    assert torch.equal(compression.plan.slots["w"].state["residual"], torch.zeros(64))


def test_loss_scale_may_change(hvd):
    """Residuals are kept in unscaled units: identity T holds over unscaled gradients."""
    scale = [1024.0]
    world = World("topk(ratio=0.1)", {"w": (50,)}, loss_scale=lambda: scale[0])
    total, want = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for step, factor in enumerate((1024.0, 512.0, 65536.0)):
        scale[0] = factor
        total += world.reduce({"w": randn(50, seed=step) * factor})["w"].double() / factor
        want += mean_over_ranks(lambda rank, step=step: randn(50, seed=step, rank=rank))
    torch.testing.assert_close(total + world.residual("w"), want, rtol=0, atol=1e-5)


def test_changed_gradient_is_refused(hvd):
    """Case B5."""
    world = World("uniform(bits=8)", {"w": (50,)})
    world.optimizer.zero_grad()
    world.backward({"w": torch.ones(50)})
    world.params["w"].grad.zero_()
    with pytest.raises(UsageError, match="synchronize"):
        world.optimizer.synchronize()


def test_residuals_do_not_pile_up(hvd):
    """Case G3: gradients are new tensors each step, residuals are not."""
    world = World("topk(ratio=0.1)", {"w": (50,), "v": (60,)})
    for step in range(20):
        world.reduce({"w": randn(50, seed=step), "v": randn(60, seed=step)})
        if step == 0:
            pointers = {name: slot.state["residual"].data_ptr() for name, slot in world.compression.plan.slots.items()}
    assert pointers == {name: slot.state["residual"].data_ptr()
                        for name, slot in world.compression.plan.slots.items()}
