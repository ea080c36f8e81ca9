"""``gradcomp.DGCOptimizer``: the numbers of cases H1 to H4, on any number of ranks, one included."""

import copy

import numpy as np
import pytest
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.errors import SpecError, StateError, UsageError
from tests.dgc_reference import Reference

from .world import assert_equal_on_ranks, randn

MOMENTUM = {"lr": 1.0, "momentum": 0.9}


class Run:
    """One parameter (or some) under DGC; every rank's gradient is what the test says."""

    def __init__(self, weights, ratio=0.5, sgd=MOMENTUM, *, base=None, **options):
        self.param = torch.nn.Parameter(torch.as_tensor(weights, dtype=torch.float32).clone())
        self.optimizer = gradcomp.DGCOptimizer(
            (base or torch.optim.SGD)([self.param], **sgd), [("w", self.param)], ratio,
            **{"warmup_steps": 0, "min_size": 0, **options})

    def step(self, grad):
        self.optimizer.zero_grad()
        (self.param * torch.as_tensor(grad, dtype=torch.float32)).sum().backward()
        self.optimizer.step()
        return self.param.detach().clone()

    def steps(self, grad, count):
        return [self.step(grad).tolist() for _ in range(count)]


def close(got, want):
    np.testing.assert_allclose(torch.as_tensor(got).numpy(), np.array(want), atol=1e-4)


def test_factor_masking(hvd):
    """Case H1, the separating numbers."""
    close(Run([0.0, 0.0]).steps([1.0, 0.4], 4), [[-1, 0], [-1, -1.16], [-3.9, -1.16], [-3.9, -2.32]])


def test_momentum_is_not_counted_twice(hvd):
    """Case H1, everything kept."""
    close(Run([0.0], ratio=1.0).steps([1.0], 3), [[-1], [-2.9], [-5.61]])


def test_weight_decay_is_local(hvd):
    """Case H2."""
    run = Run([1.0, 2.0], sgd={"lr": 1.0, "weight_decay": 0.1})
    close(run.steps([0.0, 0.0], 2), [[1, 1.8], [0.8, 1.8]])
    close(run.optimizer.compression.state_dict()["tensors"]["w"]["residual"], [0, 0.18])


def test_begin_warm_up_and_last_ratio(hvd):
    """Case H3: dense before step 10, four ratios, the last one for good, and resumption in the middle."""
    ratios = [0.25, 0.0625, 0.016, 0.001]
    options = {"begin_step": 10, "warmup_steps": 4, "warmup_schedule": ratios}
    n = 2000
    run, plain = Run(torch.zeros(n), 0.001, **options), Plain(hvd, torch.zeros(n), MOMENTUM)
    for step in range(16):
        before = run.param.detach().clone()
        after = run.step(randn(n, seed=step))
        moved = int((after != before).sum())
        if step < 10:
            torch.testing.assert_close(after, plain.step(randn(n, seed=step)), rtol=1e-5, atol=1e-5)
        else:
            k = round(n * ratios[min(step - 10, 3)])
            assert k <= moved <= hvd.size() * k, f"step {step} moved {moved} entries, {k} from each rank"
        if step == 11:
            saved = copy.deepcopy((run.param.detach(), run.optimizer.state_dict(),
                                   run.optimizer.compression.state_dict()))
    resumed = Run(saved[0], 0.001, **options)
    resumed.optimizer.load_state_dict(saved[1])
    resumed.optimizer.compression.load_state_dict(saved[2])
    for step in range(12, 16):
        last = resumed.step(randn(n, seed=step))
    assert torch.equal(last, after)
    assert_equal_on_ranks(last)


def test_local_clipping(hvd):
    """Case H3: a norm of 2 at threshold 1 becomes 1 / sqrt(ranks)."""
    run = Run(torch.zeros(4), clip_norm=1.0, sgd={"lr": 1.0})
    close(run.step([2.0, 0.0, 0.0, 0.0]), [-1 / np.sqrt(hvd.size()), 0, 0, 0])
    close(run.step([0.1, 0.0, 0.0, 0.0])[0], -1 / np.sqrt(hvd.size()) - 0.1)


@pytest.mark.parametrize("min_size", [0, 10])
def test_momentum_moves_what_gets_no_gradient(hvd, min_size):
    """Case H4, dense by its ratio and by its size."""
    run = Run([0.0], 1.0 if min_size == 0 else 0.5, {"lr": 1.0, "momentum": 0.5}, min_size=min_size)
    for grad in (1.0, 0.0, 1.0):
        last = run.step([grad])
    close(last, [-2.75])


class Plain:
    """The same under SGD and stock Horovod."""

    def __init__(self, hvd, weights, sgd):
        self.param = torch.nn.Parameter(weights.clone())
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD([self.param], **sgd),
                                                  named_parameters=[("plain", self.param)])

    step = Run.step


@pytest.mark.parametrize("sgd", [
    MOMENTUM, {**MOMENTUM, "lr": 0.1, "weight_decay": 0.05}, {**MOMENTUM, "lr": 0.1, "nesterov": True,
                                                             "weight_decay": 0.05}, {"lr": 0.5}])
@pytest.mark.parametrize("options", [{"ratio": 1.0}, {"ratio": 0.01, "begin_step": 100}])
def test_a_dense_run_is_plain_sgd(hvd, sgd, options):
    start = randn(7, 11, seed=99, rank=0)
    run, plain = Run(start, sgd=sgd, **options), Plain(hvd, start, sgd)
    for step in range(8):
        grad = randn(7, 11, seed=step)
        torch.testing.assert_close(run.step(grad), plain.step(grad), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [
    {}, {"nesterov": True}, {"weight_decay": 0.05}, {"nesterov": True, "weight_decay": 0.05, "clip_norm": 3.0}])
def test_as_the_paper_says(hvd, options):
    """Different gradients on every rank; dense for three steps, whose momentum the velocity takes over."""
    sgd = {"lr": 0.1, "momentum": 0.9, **{key: value for key, value in options.items() if key != "clip_norm"}}
    n, k = 60, 3
    start = randn(n, seed=99, rank=0)
    run = Run(start, k / n, sgd, begin_step=3, clip_norm=options.get("clip_norm"))
    reference = Reference(start.numpy(), hvd.size(), lambda step: None if step < 3 else k, lr=0.1, **options)
    for step in range(12):
        want = reference.step([randn(n, seed=step, rank=rank).numpy() for rank in range(hvd.size())])
        np.testing.assert_allclose(run.step(randn(n, seed=step)).numpy(), want, atol=1e-5)
    state = run.optimizer.compression.state_dict()["tensors"]["w"]
    np.testing.assert_allclose(state["momentum"].numpy(), reference.u[hvd.rank()], atol=1e-5)
    np.testing.assert_allclose(state["residual"].numpy(), reference.v[hvd.rank()], atol=1e-5)


def test_the_users_changes_take_effect(hvd):
    """Case H1: schedulers made before and after wrapping, momentum changed by hand, groups of their own."""
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    base = torch.optim.SGD([{"params": [a], "lr": 1.0, "momentum": 0.9}, {"params": [b]}], lr=0.5, momentum=0.0)
    before = torch.optim.lr_scheduler.LambdaLR(base, lambda step: 0.1 if step else 1.0)
    optimizer = gradcomp.DGCOptimizer(base, [("a", a), ("b", b)], 0.5, warmup_steps=0, min_size=0)
    assert isinstance(optimizer, torch.optim.SGD)
    seen = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        (a[0] + b[0]).backward()
        optimizer.step()
        seen.append([float(a[0].detach()), float(b[0].detach())])
        if step == 0:
            with pytest.warns(UserWarning, match="lr_scheduler.step"):
                before.step()  # torch sees only that the optimizer inside has not stepped
        if step == 1:
            optimizer.param_groups[1]["momentum"] = 0.5
            after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
        if step == 2:
            after.step()
            optimizer.param_groups[0]["lr"] = 2.0
    # the other entry is never larger, so entry 0 is sent in every step, and masking clears its velocity
    close(seen, [[-1, -0.5], [-1.1, -0.55], [-1.2, -0.6], [-3.2, -0.65]])


def test_closure_and_hooks(hvd):
    run, calls = Run([0.0, 0.0]), []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        run.optimizer.zero_grad(set_to_none=True)
        loss = (run.param * torch.tensor([1.0, 0.4])).sum() + 7.0
        loss.backward()
        return loss.detach()

    assert float(run.optimizer.step(closure)) == 7.0
    close(run.param.detach(), [-1, 0])
    assert calls == ["pre", "post"]


def test_synchronize_before_step_applies_momentum_once(hvd):
    """Case J1, with and without ``skip_synchronize``."""
    run = Run([0.0, 0.0])
    for step in range(2):
        run.optimizer.zero_grad()
        (run.param * torch.tensor([1.0, 0.4])).sum().backward()
        run.optimizer.synchronize()
        if step == 0:
            with run.optimizer.skip_synchronize():
                run.optimizer.step()
        else:
            with pytest.warns(UserWarning, match="skip_synchronize"):
                run.optimizer.step()
    close(run.param.detach(), [-1, -1.16])


def test_a_step_with_an_inf_moves_nothing_it_keeps(hvd):
    """Cases B1 and B2: the scaler skips everywhere, and all goes on as if the step had not been."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run, plain = Run(torch.zeros(40), 0.1, loss_scale=scaler), Run(torch.zeros(40), 0.1)
    for step in range(4):
        grad = randn(40, seed=step)
        bad = grad.clone()
        bad[0] = float("inf") if step == 1 and hvd.rank() == 0 else bad[0]
        run.optimizer.zero_grad()
        scaler.scale((run.param * bad).sum()).backward()
        run.optimizer.synchronize()
        scaler.unscale_(run.optimizer)
        with run.optimizer.skip_synchronize():
            scaler.step(run.optimizer)
        scaler.update()
        if step != 1:
            plain.step(grad)
        torch.testing.assert_close(run.param.detach(), plain.param.detach(), rtol=1e-6, atol=1e-6)
    assert scaler.get_scale() == 512.0


def test_broadcasts_after_wrapping_disturb_nothing(hvd):
    """Case K1 (a), with weight decay."""
    run = Run(torch.ones(4), sgd={**MOMENTUM, "weight_decay": 0.1})
    before = copy.deepcopy(run.optimizer.compression.state_dict()["tensors"])
    hvd.broadcast_parameters({"w": run.param}, root_rank=0)
    hvd.broadcast_optimizer_state(run.optimizer, root_rank=0)
    assert torch.equal(run.param.detach(), torch.ones(4))
    after = run.optimizer.compression.state_dict()["tensors"]
    assert all(torch.equal(before["w"][key], after["w"][key]) for key in before["w"])
    run.step([1.0, 0.0, 0.0, 0.0])


def test_momentum_of_earlier_training_is_taken_over(hvd):
    """An SGD that has trained already: its momentum becomes the velocity, or stays with the small tensors."""
    for min_size in (0, 10):
        param = torch.nn.Parameter(torch.zeros(2))
        base = torch.optim.SGD([param], **MOMENTUM)
        param.grad = torch.tensor([1.0, 0.0])
        base.step()
        optimizer = gradcomp.DGCOptimizer(base, [("w", param)], 1.0 if min_size else 0.01, begin_step=5,
                                          min_size=min_size)
        optimizer.zero_grad()
        (param * torch.tensor([1.0, 0.0])).sum().backward()
        optimizer.step()
        close(param.detach(), [-2.9, 0.0])


def test_names_may_be_omitted_or_name_more(hvd):
    """Case I3: names of parameters that belong to no group do no harm."""
    param, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    for named in (None, [("w", param), ("other", other)]):
        optimizer = gradcomp.DGCOptimizer(torch.optim.SGD([param], **MOMENTUM), named, 0.5, 0, min_size=0)
        (param * torch.tensor([1.0, 0.0])).sum().backward()
        optimizer.step()
        assert len(optimizer.state_dict()["state"]) == 1
        optimizer.zero_grad()
    close(param.detach(), [-2, 0])
    with pytest.raises(UsageError, match="named_parameters is empty"):
        gradcomp.DGCOptimizer(torch.optim.SGD([param], **MOMENTUM), [])


def test_backward_passes_and_values_in_few_bits(hvd):
    """Case J3: local passes are summed, as without compression."""
    run = Run(torch.zeros(50), 0.1, {"lr": 1.0}, value_codec="uniform(bits=8)", backward_passes_per_step=2)
    run.optimizer.zero_grad()
    for _ in range(2):
        (run.param * torch.linspace(1.0, 2.0, 50)).sum().backward()
    run.optimizer.step()
    torch.testing.assert_close(run.param.detach()[-5:], -2 * torch.linspace(1.0, 2.0, 50)[-5:], rtol=0, atol=1e-3)
    assert run.optimizer.compression.stats()["tensors"]["w"]["codec"].endswith("+ uniform(bits=8)")


def test_many_tensors_train_and_ranks_end_equal(hvd):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = gradcomp.DGCOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
                                      model.named_parameters(), 0.02, warmup_steps=20, min_size=256,
                                      value_codec="uniform(bits=8)")
    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(5))
    losses = []
    for step in range(80):
        x = randn(32, 32, seed=step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert_equal_on_ranks(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:10])
    stats = optimizer.compression.stats()
    assert stats["steps"] == 80 and "ratio=0.02" in stats["tensors"]["0.weight"]["codec"]
    assert stats["tensors"]["0.bias"]["codec"] is None


def test_what_cannot_be_is_refused(hvd):
    def make(sgd=None, base=torch.optim.SGD, **options):
        param = torch.nn.Parameter(torch.zeros(4))
        return gradcomp.DGCOptimizer(base([param], **(sgd or MOMENTUM)), [("w", param)], **options)

    with pytest.raises(UsageError, match=r"Adam.*DistributedOptimizer"):
        make({"lr": 0.1}, torch.optim.Adam)
    with pytest.raises(UsageError, match="dampening"):
        make({**MOMENTUM, "dampening": 0.1})
    with pytest.raises(UsageError, match="maximize"):
        make({**MOMENTUM, "maximize": True})
    with pytest.raises(UsageError, match="op=Average"):
        make(op=hvd.Sum)
    for name, value in [("ratio", 0), ("ratio", -0.1), ("clip_norm", 0), ("warmup_steps", 2), ("begin_step", -1),
                        ("warmup_schedule", [0.5, 0.0])]:
        with pytest.raises(SpecError, match=name):
            make(**{name: value})
    run = Run([0.0, 0.0])
    with pytest.raises(StateError, match="another configuration"):
        run.optimizer.compression.load_state_dict(Run([0.0, 0.0], 0.9).optimizer.compression.state_dict())


@pytest.mark.parametrize("exchange", ["two_stage", "sparse_split"])
def test_other_exchanges(hvd, exchange):
    """Nothing is lost: what left the ranks' memories is what moved the weights; with a dense stage before."""
    shapes = {"a": (40, 30), "b": (257,)}
    params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    optimizer = gradcomp.DGCOptimizer(torch.optim.SGD(params.values(), lr=1.0, momentum=0.9), params.items(), 0.05,
                                      warmup_steps=0, begin_step=2, min_size=0, exchange=exchange,
                                      value_codec="uniform(bits=8)")
    for step in range(6):
        before = {name: param.detach().clone() for name, param in params.items()}
        old = copy.deepcopy(optimizer.compression.state_dict()["tensors"])
        grads = {name: randn(*shape, seed=step) for name, shape in shapes.items()}
        optimizer.zero_grad()
        sum((param * grads[name]).sum() for name, param in params.items()).backward()
        optimizer.step()
        if step < 2:
            continue
        for name, new in optimizer.compression.state_dict()["tensors"].items():
            n = params[name].numel()
            sent = old[name]["residual"] + 0.9 * old[name]["momentum"] + grads[name].reshape(-1) - new["residual"]
            if "owner_residual" in new and hvd.size() > 1:
                begin, end = hvd.rank() * n // hvd.size(), (hvd.rank() + 1) * n // hvd.size()
                sent[begin:end] -= hvd.size() * (new["owner_residual"] - old[name]["owner_residual"])[: end - begin]
            want = hvd.allreduce(sent, name=f"sent.{name}").view(shapes[name])
            moved = before[name] - params[name].detach()
            torch.testing.assert_close(moved, want, rtol=0, atol=1e-4)
            assert int((moved != 0).sum()) >= 0.04 * n
    assert_equal_on_ranks(torch.cat([param.detach().reshape(-1) for param in params.values()]))
    assert optimizer.compression.stats()["tensors"]["a"]["exchange"] == exchange
