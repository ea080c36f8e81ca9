"""The golden files: one for each spec whose bytes are the same everywhere, with everything they hold.

A JSON object: ``spec``; ``layout`` (parts in the order of the wire, ``[name, items, dtype]``), and for
each input by name ``input`` and ``decoded`` (float32) and ``payload``, as hexadecimal little-endian bytes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_gradcomp import parse
from tests.contract.backends import NUMPY, Backend
from tests.contract.laws import Single
from tests.contract.specs import EXACT

FOLDER = Path(__file__).parent
SPECS = EXACT
RANK, RANKS, SEED, STEP = 1, 3, 5, 2
"""What the payload depends on beside the values, where it does."""

Floats = NDArray[np.float32]


def inputs() -> dict[str, Floats]:
    """Two vectors made of whole numbers alone, so that every machine and every version of numpy makes the same."""
    state, ordinary = 1, []
    for _ in range(75):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        ordinary.append((state >> 8) % 20001 - 10000)
    odd = [0.0, -0.0, 1.0, -1.0, 1.0, 0.5, 1.5, 2.5, -2.5, 2.0**-149, -(2.0**-130), 2.0**-126, -(2.0**-101), 2.0**-60,
           1e-7, 65504.0, 65520.0, 1e30, -3e38, 3e38, 3.4028234663852886e38]
    return {"ordinary": np.array(ordinary, np.float32) / np.float32(4096), "odd": np.array(odd, np.float32)}


def path(spec: str) -> Path:
    """Where the golden file of a spec stands."""
    return FOLDER / (re.sub(r"[^a-z0-9.]+", "-", spec.lower().replace(" + ", "-then-")).strip("-") + ".json")


def single(spec: str, n: int, backend: Backend) -> Single:
    """The codec as the golden files use it."""
    return Single(parse(spec), n, backend, rank=RANK, ranks=RANKS, seed=SEED)


def content(spec: str) -> dict[str, Any]:
    """What the golden file of a spec should hold, by the numpy operations."""
    cases = {}
    for name, x in inputs().items():
        codec = single(spec, x.size, NUMPY)
        payload = codec.encode(x, STEP)
        decoded = codec.decode(payload, x, STEP)
        cases[name] = {"input": x.tobytes().hex(), "payload": payload.tobytes().hex(),
                       "decoded": decoded.tobytes().hex(),
                       "layout": [[part.name, part.length, part.dtype] for part in codec.layout]}
    return {"spec": spec, "rank": RANK, "ranks": RANKS, "seed": SEED, "step": STEP, **cases}


def text(spec: str) -> str:
    """:func:`content` as it stands in the file."""
    return json.dumps(content(spec), indent=1) + "\n"


def load(spec: str) -> dict[str, Any]:
    """The golden file of a spec. A missing one is an error, never made on the way."""
    if not path(spec).exists():
        raise FileNotFoundError(f"{path(spec).name} is missing: look at what 'make golden' changes, and commit it")
    golden: dict[str, Any] = json.loads(path(spec).read_text(encoding="utf-8"))
    return golden
