"""The project's own random numbers: spread evenly and unrelated for any two keys; the same everywhere."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray

from hvd_gradcomp import parse
from hvd_gradcomp.ops import rng
from hvd_gradcomp.spec import TensorSpec
from tests.contract.backends import BACKENDS, NUMPY, Backend
from tests.contract.laws import Single

BASE: dict[str, Any] = {"seed": 0, "spec": TensorSpec("weight", (7, 3)), "step": 0, "rank": 0, "stream": 0}
OTHERS: list[dict[str, Any]] = [
    {}, {"seed": 1}, {"seed": -1}, {"seed": 1 << 32}, {"seed": 1 << 40}, {"spec": TensorSpec("bias", (7, 3))},
    {"step": 1}, {"step": 2}, {"step": 1 << 20}, {"rank": 1}, {"rank": 2}, {"rank": rng.SHARED}, {"stream": 1},
    {"rank": 1, "step": 1}, {"seed": 1, "step": 1}]


def draw(n: int, backend: Backend = NUMPY, **change: Any) -> NDArray[np.float32]:
    key = {**BASE, **change}
    step = backend.array(np.array([key.pop("step")], np.int32))
    drawn = backend.compiled(lambda step: rng.uniform(backend.ops, n, step=step, **key))(step)
    return backend.numpy(drawn)


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_spread_evenly(change: dict[str, Any]) -> None:
    """Chi-square of 64 bins, of the upper bits and of lower ones: mean 63, standard deviation 11.2."""
    u = draw(1 << 16, **change).astype(np.float64)
    for part in (u, u * 64 % 1, u * 4096 % 1):
        counts = np.bincount((part * 64).astype(int), minlength=64)
        assert ((counts - 1024.0) ** 2 / 1024).sum() < 63 + 6 * 11.2
    pairs = np.bincount((u[::2] * 8).astype(int) * 8 + (u[1::2] * 8).astype(int), minlength=64)
    assert ((pairs - 512.0) ** 2 / 512).sum() < 63 + 6 * 11.2, "neighbors depend on each other"


def test_different_for_every_key() -> None:
    draws = [draw(1 << 14, **change).astype(np.float64) - 0.5 for change in OTHERS]
    for (i, one), (j, other) in combinations(enumerate(draws), 2):
        for lag in (0, 1, 2):
            correlation = 12 * (one[lag:] * other[: one.size - lag]).mean()
            assert abs(correlation) < 6 / np.sqrt(one.size), f"{OTHERS[i]} and {OTHERS[j]} at lag {lag}"


def test_steps_are_independent_at_one_place() -> None:
    u = np.array([draw(4, step=step) for step in range(4096)]).astype(np.float64)
    for place in u.T:
        counts = np.bincount((place * 16).astype(int), minlength=16)
        assert ((counts - 256.0) ** 2 / 256).sum() < 15 + 6 * np.sqrt(30)
        assert abs(12 * ((place[1:] - 0.5) * (place[:-1] - 0.5)).mean()) < 6 / np.sqrt(place.size)


def test_longer_draws_begin_with_the_shorter() -> None:
    assert np.array_equal(draw(1000)[:10], draw(10))


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=str)
def test_the_same_in_every_framework(backend: Backend) -> None:
    for change in OTHERS:
        assert draw(1025, backend, **change).tobytes() == draw(1025, **change).tobytes()


def test_the_generators_of_the_user_are_left_alone() -> None:
    def states() -> tuple[Any, ...]:
        return (np.random.get_state()[1].tobytes(), np.random.get_state()[2],  # type: ignore[index]
                torch.get_rng_state().tolist(), tf.random.get_global_generator().state.numpy().tolist())

    before = states()
    for backend in BACKENDS:
        Single(parse("uniform(bits=4, stochastic=True)"), 41, backend).send(np.ones(41, np.float32))
    assert states() == before
