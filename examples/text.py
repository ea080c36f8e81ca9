"""Text for the language model that every Python brings: the source of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 256
Bytes = NDArray[np.uint8]


def load(limit: int = 4_000_000) -> tuple[Bytes, Bytes]:
    """``(training bytes, test bytes)`` of the first ``limit``, every tenth file for testing."""
    train, test = bytearray(), bytearray()
    for i, file in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        (test if i % 10 == 9 else train).extend(file.read_bytes())
        if len(train) >= limit:
            break
    return np.frombuffer(bytes(train[:limit]), np.uint8), np.frombuffer(bytes(test[:limit // 10]), np.uint8)


def windows(text: Bytes, length: int, batch_size: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """``steps`` batches ``[batch_size, length + 1]`` from random places: inputs and, one later, what to predict."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        begins = random.integers(0, len(text) - length, batch_size)
        yield text[begins[:, None] + np.arange(length + 1)].astype(np.int64)
