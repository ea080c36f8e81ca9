"""``Codec.vouching``: what a payload says about the gradient's being finite is true."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_gradcomp import coding, parse
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.memory.base import NoMemory
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.spec import TensorSpec

OPS = NumpyOps()
CODECS = ["sign", "sign(block=64)", "log", "uniform(bits=8)", "uniform(bits=16, block=None)",
          "uniform(bits=2, symmetric=True)", "uniform(bits=4, stochastic=True)", "topk(ratio=0.01)",
          "topk(ratio=0.01, index='plain')", "topk(ratio=0.01) + uniform(bits=8)", "topk(ratio=0.01) + sign"]
N = 3000


def vouched(text: str, x: np.ndarray) -> bool:
    codec, ctx = parse(text), Ctx(OPS, TensorSpec("w", (x.size,)), 2, 0, 7, {"step": np.zeros(1, np.int32)})
    with np.errstate(all="ignore"):
        return coding.vouched(codec, coding.encode(codec, NoMemory(OPS, x), ctx), ctx)


def normal() -> np.ndarray:
    return np.random.default_rng(0).normal(size=N).astype(np.float32)


@pytest.mark.parametrize("text", CODECS)
def test_what_is_finite_is_vouched_for(text: str) -> None:
    assert vouched(text, normal()) and vouched(text, np.zeros(N, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [slice(0, 1), slice(N // 2, N // 2 + 1), slice(N - 1, N), slice(2048, None),
                                   slice(None)])
@pytest.mark.parametrize("text", CODECS)
def test_what_is_not_finite_is_never_vouched_for(text: str, where: slice, bad: float) -> None:
    x = normal()
    x[where] = bad
    assert not vouched(text, x)


@pytest.mark.parametrize("text", ["fp16", "natural", "topk(ratio=0.01, threshold='sampled')",
                                  "topk(ratio=0.01) + fp16"])
def test_who_cannot_tell_does_not_vouch(text: str) -> None:
    assert not parse(text).vouching
