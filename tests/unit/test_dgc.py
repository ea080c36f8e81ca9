"""Deep Gradient Compression in lockstep worlds: the paper's numbers in every framework, void steps, loss scales."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hvd_gradcomp.codecs.dense import Dense
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.schedule import Schedule, dgc
from hvd_gradcomp.spec import parse
from tests.contract.backends import BACKENDS, NUMPY, TENSORFLOW_GRAPH, Backend
from tests.dgc_reference import Reference

N, K = 60, 3
SETTINGS = [{}, {"nesterov": True}, {"weight_decay": 0.05},
            {"nesterov": True, "weight_decay": 0.05, "clip_norm": 3.0}]


def gradients(step: int, ranks: int) -> list[np.ndarray]:
    return [np.random.RandomState(100 * step + rank).standard_normal(N).astype("float32") for rank in range(ranks)]


def dense_steps(backend: Backend) -> int:
    """A lockstep world looks a schedule up in Python, so one trace has no dense stage before."""
    return 0 if backend is TENSORFLOW_GRAPH else 2


def run(backend: Backend, ranks: int, steps: int, dense: int, scale: float | None = None, bad_step: int = -1,
        **settings: Any) -> Iterator[tuple[np.ndarray, LocalWorld]]:
    """Weights and world after every step."""
    world = LocalWorld(dgc(K / N, begin_step=dense), {"w": (N,)}, ranks, ops=backend.ops, dgc=True,
                       state=backend.state)
    weights = np.linspace(-1, 1, N).astype("float32")
    lr, clip = 0.1, settings.pop("clip_norm", None)

    def reduce(grads: list[Any], weights: Any) -> Any:
        sgd = Momentum(0.9, weights=weights if "weight_decay" in settings else None, clip_norm=clip, **settings)
        return world.step([{"w": g} for g in grads], sgd=sgd, loss_scale=scale)[-1]["w"]

    compiled = backend.compiled(reduce)
    for step in range(steps):
        grads = [g * np.float32(scale or 1.0) for g in gradients(step, ranks)]
        if step == bad_step:
            grads[0][0] = np.nan
        out = backend.numpy(compiled([backend.array(g) for g in grads], backend.array(weights)))
        if step == bad_step:
            assert np.isnan(out).all()
            out = np.zeros(N, np.float32)
        weights = weights - np.float32(lr / (scale or 1.0)) * out
        yield weights, world


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_every_framework_gives_the_papers_numbers(backend: Backend, settings: dict[str, Any]) -> None:
    dense = dense_steps(backend)
    reference = Reference(np.linspace(-1, 1, N), 3, lambda step: None if step < dense else K, lr=0.1, **settings)
    history = list(run(backend, 3, 8, dense, **settings))
    for step, (weights, _) in enumerate(history):
        np.testing.assert_allclose(weights, reference.step(gradients(step, 3)), atol=1e-5)
    world = history[-1][1]
    for rank in range(3):
        state = world.plans[rank].slots["w"].state
        np.testing.assert_allclose(backend.numpy(state["momentum"]), reference.u[rank], atol=1e-5)
        np.testing.assert_allclose(backend.numpy(state["residual"]), reference.v[rank], atol=1e-5)


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend is not NUMPY], ids=str)
def test_frameworks_agree_to_the_bit(backend: Backend) -> None:
    dense = dense_steps(backend)
    for (one, _), (other, _) in zip(run(NUMPY, 2, 6, dense, **SETTINGS[3]), run(backend, 2, 6, dense, **SETTINGS[3]),
                                    strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_loss_scale_changes_nothing(settings: dict[str, Any]) -> None:
    for (one, _), (other, _) in zip(run(NUMPY, 2, 6, 2, **settings), run(NUMPY, 2, 6, 2, scale=1024.0, **settings),
                                    strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad_step", [1, 4])
@pytest.mark.parametrize("backend", [NUMPY, TENSORFLOW_GRAPH], ids=str)
def test_a_void_step_moves_no_state(backend: Backend, bad_step: int) -> None:
    states = []
    for _, world in run(backend, 2, bad_step + 1, dense_steps(backend), bad_step=bad_step):
        states.append([{key: backend.numpy(array).tobytes() for key, array in plan.slots["w"].state.items()}
                       for plan in world.plans])
    assert states[bad_step] == states[bad_step - 1]
    assert bad_step == 1 or states[0] != states[-1], "the other steps do"


def test_nothing_that_was_accumulated_is_lost() -> None:
    """Without momentum there is no masking to lose any: outputs plus mean residual are the mean gradients,
    also while the number of values in the payload changes."""
    stages = dgc(K / N, warmup_steps=3, warmup_schedule=[0.5, 0.25, 0.1], value_codec="uniform(bits=8)")
    world = LocalWorld(stages, {"w": (N,)}, 2, dgc=True)
    total = np.zeros(N)
    for step in range(5):
        total += world.step([{"w": g} for g in gradients(step, 2)], sgd=Momentum(0.0))[0]["w"]
        kept = np.mean([plan.slots["w"].state["residual"] for plan in world.plans], axis=0)
        want = np.sum([np.mean(gradients(s, 2), axis=0) for s in range(step + 1)], axis=0)
        np.testing.assert_allclose(total + kept, want, atol=1e-5)


@pytest.mark.parametrize("compressed", [True, False])
def test_nothing_waits_for_a_device(compressed: bool) -> None:
    """A step runs on tensors that have no values, compressed and dense."""
    codec = dgc(K / N) if compressed else Schedule((0,), (Dense(),))
    world = LocalWorld(codec, {"w": (N,)}, 2, dgc=True, ops=TorchOps("meta"))
    grads = [{"w": torch.zeros(N, device="meta")} for _ in range(2)]
    sgd = Momentum(0.9, True, 0.1, torch.zeros(N, device="meta"), 1.0)
    assert world.step(grads, sgd=sgd)[0]["w"].shape == (N,)


def test_an_infinitely_large_norm_is_clipped() -> None:
    """Squares of these overflow float32."""
    world = LocalWorld(dgc(1 / 4), {"w": (4,)}, 1, dgc=True)
    out = world.step([{"w": np.float32([3e30, 0, 0, 0])}], sgd=Momentum(0.0, clip_norm=2.0))[0]["w"]
    np.testing.assert_allclose(out, [2, 0, 0, 0], rtol=1e-5)


def test_the_stages() -> None:
    """Case H3."""
    stages = dgc(0.001, begin_step=10, warmup_steps=4, warmup_schedule=[0.25, 0.0625, 0.016, 0.001])
    assert isinstance(stages, Schedule)
    kept = [getattr(stages.codecs[stages.stage(step)], "ratio", 1.0) for step in (0, 9, 10, 11, 12, 13, 14, 10_000)]
    assert kept == [1.0, 1.0, 0.25, 0.0625, 0.016, 0.001, 0.001, 0.001]
    assert dgc(1.28) == dgc(1) == Dense()
    assert dgc(0.01) == parse("topk(ratio=0.01)")
    default = dgc(0.01, warmup_steps=6)
    assert isinstance(default, Schedule) and default.begins == (0, 2, 4, 6), "the ramp does not go below the ratio"
    assert str(dgc(0.1, value_codec="uniform(bits=8)")).endswith("+ uniform(bits=8)")


@pytest.mark.parametrize(("name", "value"), [
    ("ratio", 0), ("ratio", "0.1"), ("warmup_schedule", [0.5, -1.0]), ("warmup_steps", 3), ("begin_step", 0.5),
    ("threshold", "none")])
def test_settings_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=name):
        dgc(**{"ratio": 0.001, name: value})


@pytest.mark.parametrize("exchange", ["gather", "two_stage", "sparse_split"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_exchange_sends_what_leaves_the_memory(exchange: str, nesterov: bool, ranks: int) -> None:
    """By the states before and after each step: ``v`` lost what was sent, ``u`` is 0 exactly there, and the mean of
    what was sent, with what the owners of chunks kept, is what everyone receives."""
    sgd, n = Momentum(0.9, nesterov=nesterov), 403
    world = LocalWorld("topk(ratio=0.05) + uniform(bits=8)", {"w": (13, 31)}, ranks, exchange=exchange, dgc=True)
    states = [plan.slots["w"].state for plan in world.plans]
    moved = 0
    for step in range(6):
        grads = [np.random.default_rng((step, rank)).normal(size=(13, 31)).astype(np.float32)
                 for rank in range(ranks)]
        before = [{key: array.astype(np.float64) for key, array in state.items()} for state in states]
        outs = world.step([{"w": grad} for grad in grads], sgd=sgd)
        assert all(out["w"].tobytes() == outs[0]["w"].tobytes() for out in outs)
        want = np.zeros(n)
        for rank, (old, new) in enumerate(zip(before, states, strict=True)):
            g = grads[rank].ravel().astype(np.float64)
            u = 0.9 * (old["momentum"] + g) if nesterov else 0.9 * old["momentum"] + g
            v = old["residual"] + u + (g if nesterov else 0.0)
            sent = v - new["residual"]
            sent[np.abs(sent) < 2e-6] = 0.0
            want += sent / ranks
            # Under sparse_split an owner's is 0 too where all it counts as sent is the rounding of another's entry.
            cleared = (sent != 0.0) | ((new["momentum"] == 0.0) & (exchange == "sparse_split"))
            np.testing.assert_allclose(new["momentum"], np.where(cleared, 0.0, u), rtol=0, atol=1e-5)
            moved += int((sent != 0.0).sum())
            if exchange == "two_stage":
                begin, end = rank * n // ranks, (rank + 1) * n // ranks
                want[begin:end] -= (new["owner_residual"] - old["owner_residual"])[: end - begin]
        np.testing.assert_allclose(outs[0]["w"].ravel(), want, rtol=0, atol=1e-4)
    assert moved >= 6 * ranks * 8, "little was sent, so little was tested"
