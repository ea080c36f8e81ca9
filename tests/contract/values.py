"""Deterministic inputs: ordinary gradients, and the odd ones that broke somebody's training."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Grads = list[dict[str, Floats]]

ODD_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (3,), (7,), (1025,), (33, 31))
FLUSHED = np.float32(2.0**-126)
"""Magnitudes below this are denormals, which TensorFlow takes as 0."""


def normal(key: str, shape: Sequence[int]) -> Floats:
    """Normal values that depend on ``key`` alone."""
    return np.random.default_rng(crc32(key.encode())).normal(size=tuple(shape)).astype(np.float32)


def gradients(step: int, ranks: int, shapes: dict[str, tuple[int, ...]]) -> Grads:
    """``[rank][name]``; the ranks differ in scale as well, so that codes of theirs are not addable."""
    return [{name: np.float32(10.0 ** -(rank % 3)) * normal(f"{name}/{rank}/{step}", shape)
             for name, shape in shapes.items()} for rank in range(ranks)]


def odd(n: int) -> dict[str, Floats]:
    """Odd vectors of ``n`` finite elements, by name."""
    some = normal("odd", (n,))

    def cycle(*values: float) -> Floats:
        return np.resize(np.array(values, np.float32), n)

    spread = some.copy()
    spread[0], spread[-1] = 1e30, 1e-30
    return {
        "zeros": cycle(0.0),
        "constant": cycle(3.0),
        "huge and tiny": spread,
        "denormals": cycle(1e-40, -3e-39, 0.0, 1e-45),
        "denormals beside small": cycle(2e-38, -1e-39, 5e-38, 1e-40, -2e-37),
        "small": np.float32(1e-37) * some,
        "smallish": np.float32(1e-33) * some,
        "negative zeros": cycle(-0.0),
        "zeros of both signs": cycle(0.0, -0.0, -0.0),
        "zeros of both signs and more": cycle(-0.0, 0.0, 1.5, 0.25),
        "ties": cycle(0.5, -0.5, 1.0, -1.0, 1.0, 0.25),
        "on halves": cycle(0.0, 0.5, 1.5, 2.5, 15.0, 7.5),
        "near the largest": cycle(3e38, -3e38, 1.0, -2.5e38),
        "large": cycle(3e38, 2e38, 1e38),
    }


def wild(n: int, count: int) -> dict[str, Floats]:
    """``count`` vectors of any finite float32s, in four ways of spreading them over the whole range."""
    rng = np.random.default_rng(7)
    exponents = np.arange(-149.0, 127.0)
    vectors: dict[str, Floats] = {}
    for i in range(0, count, 4):
        bits = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32).view(np.float32)
        vectors[f"wild bits {i}"] = np.where(np.isfinite(bits), bits, np.float32(0.0))
        vectors[f"wild powers {i}"] = (rng.choice([-1.0, 1.0], n) * 2.0 ** rng.choice(exponents, n)).astype(np.float32)
        vectors[f"wild levels {i}"] = (rng.integers(-8, 9, n) * 2.0 ** rng.choice(exponents - 3)).astype(np.float32)
        vectors[f"wild scale {i}"] = (rng.normal(size=n) * 2.0 ** rng.choice(exponents - 3)).astype(np.float32)
    return vectors


def flush(x: Floats) -> Floats:
    """``x`` with denormals and -0.0 as 0.0: what frameworks that flush denormals make of it."""
    return np.where(np.abs(x) < FLUSHED, np.float32(0.0), x)
