"""DGC's momentum in the kernels: the same bits as the pure path, in every kind of codec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hvd_gradcomp import coding, kernels, parse
from hvd_gradcomp.codecs.base import Received
from hvd_gradcomp.codecs.matrix import Product
from hvd_gradcomp.memory import Momentum
from tests.contract import values
from tests.kernels.test_same_bytes import LENGTHS, same
from tests.kernels.world import OK, OPS, Tensor, bits, pure

SPECS = ("topk(ratio=0.01)", "topk(ratio=0.3, index='plain')", "topk(ratio=0.05) + uniform(bits=8)",
         "randomk(ratio=0.1)", "uniform(bits=5)", "sign", "natural", "qsgd(levels=4, block=128)")
CLIP = np.array([0.37], np.float32)


def sgds(n: int) -> Iterator[tuple[Momentum, dict[str, Any]]]:
    """Every setting, with the rest of a Tensor's arguments."""
    weights = values.normal("weights", (n,))
    for nesterov in (False, True):
        yield Momentum(0.9, nesterov), {}
        yield Momentum(np.array([0.9], np.float32), nesterov, np.array([0.01], np.float32), weights), {"clip": CLIP}
        yield Momentum(0.5, nesterov, 0.1, weights), {"loss_scale": 1024.0}
        yield Momentum(0.9, nesterov), {"loss_scale": 3.0, "clip": CLIP}


def tensor(spec: str, grad: np.ndarray, sgd: Momentum, **others: Any) -> Tensor:
    kept, velocity = (values.normal(name, grad.shape) for name in ("kept", "velocity"))
    return Tensor(parse(spec), grad, kept, sgd=sgd, velocity=velocity, **others)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("spec", SPECS)
def test_same_bits(spec: str) -> None:
    for n in LENGTHS:
        for sgd, others in sgds(n):
            same(tensor(spec, values.normal("grad", (n,)), sgd, **others))


@pytest.mark.parametrize("spec", ["topk(ratio=0.1)", "uniform(bits=8)"])
def test_same_bits_of_odd_values(spec: str) -> None:
    for n in LENGTHS:
        for grad in {**values.odd(n), **values.wild(n, 4)}.values():
            same(tensor(spec, grad, Momentum(0.9, True)))


@settings(max_examples=100, deadline=None)
@given(grad=arrays.arrays(np.float32, st.integers(1, 200), elements=st.floats(width=32, allow_nan=False,
                                                                              allow_infinity=False)),
       nesterov=st.booleans(), momentum=st.sampled_from([0.0, 0.9, 1.0]))
def test_same_bits_of_anything(grad: np.ndarray, nesterov: bool, momentum: float) -> None:
    with np.errstate(all="ignore"):
        zeros = np.zeros_like(grad)
        same(Tensor(parse("topk(ratio=0.1)"), grad, zeros, sgd=Momentum(momentum, nesterov), velocity=zeros))


def test_the_velocity_starts_anew_only_where_something_was_sent() -> None:
    n = 10_000
    one = tensor("topk(ratio=0.01)", values.normal("grad", (n,)), Momentum(0.9))
    velocity = one.settle(one.encode())[n:]
    assert (velocity == 0.0).sum() == 100


@pytest.mark.parametrize("spec", ["topk(ratio=0.01)", "uniform(bits=8)"])
def test_a_void_step_writes_nothing(spec: str) -> None:
    one = tensor(spec, values.normal("grad", (5000,)), Momentum(0.9))
    after = one.settle(one.encode(), np.zeros(1, np.float32))
    assert after.tobytes() == np.concatenate([one.residual, one.velocity]).tobytes()


def test_threads_change_no_bit() -> None:
    n = 4 * (1 << 18) + 1234
    one = tensor("topk(ratio=0.01)", values.normal("threads", (n,)), Momentum(0.9, True, 0.1, values.normal("w", (n,))))
    blob = one.encode()
    settled = one.settle(blob)
    try:
        kernels.set_threads(4)
        np.testing.assert_array_equal(one.encode(), blob)
        np.testing.assert_array_equal(bits(one.settle(blob)), bits(settled))
    finally:
        kernels.set_threads(None)


def test_same_bits_of_products() -> None:
    """What PowerSGD settles: p q."""
    n = 60 * 50
    one = tensor("topk", values.normal("grad", (n,)), Momentum(0.9, True))
    left, right = values.normal("left", (60, 3)), values.normal("right", (3, 50))
    kept = []
    for kernel in (True, False):
        after = replace(one, residual=one.residual.copy(), velocity=one.velocity.copy())
        received = Received(sent=Product(OPS, left, right), mean=lambda acc: acc)
        if kernel:
            coding.settle(received, after.memory, one.ctx, OK)
        else:
            with pure():
                coding.settle(received, after.memory, one.ctx, OK)
        kept.append(np.concatenate([after.residual, after.velocity]))
    np.testing.assert_allclose(kept[0], kept[1], rtol=1e-5, atol=1e-5)


def test_momentum_that_does_not_fit_is_refused() -> None:
    module = kernels.load()[0]
    x = np.zeros(8, np.float32)
    signs = module.Sign(8, 8, np.ones(1, np.float32), np.zeros(1, np.uint8))
    short = module.Momentum(x[:7], None, 0.9, 0.0, 1.0, False)
    with pytest.raises(ValueError, match="length"):
        signs.encode(x, x.copy(), 1.0, short, 1)
    with pytest.raises(ValueError, match="residual"):
        signs.encode(x, None, 1.0, module.Momentum(x.copy(), None, 0.9, 0.0, 1.0, False), 1)
    frozen = x.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        signs.decode(x.copy(), x, 1.0, module.Momentum(frozen, None, 0.9, 0.0, 1.0, False), 1)
