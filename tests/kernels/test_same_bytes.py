"""Kernels and the codecs' own operations give the same bits, whatever the values, the length or the threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hvd_gradcomp import kernels, native, parse
from hvd_gradcomp.spec import TensorSpec
from tests.contract import values
from tests.kernels.world import SPECS, Tensor, bits, pure

LENGTHS = (1, 7, 100, 1031, 5000, 20011)


def odd_values(n: int) -> dict[str, np.ndarray]:
    with_infinity = values.normal("infinity", (n,))
    with_infinity[n // 2] = np.inf
    return {"normal": values.normal("normal", (n,)), "infinity": with_infinity, **values.odd(n), **values.wild(n, 4)}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def same(tensor: Tensor) -> None:
    """Encode, decode, mean and settle."""
    blob = tensor.encode()
    acc = values.normal("acc", tensor.grad.shape)
    with pure():
        expected = tensor.encode()
        decoded, mean = tensor.decode(expected, acc), tensor.mean([expected] * 3)
        settled = tensor.settle(expected) if tensor.residual is not None else None
    np.testing.assert_array_equal(blob, expected)
    np.testing.assert_array_equal(bits(tensor.decode(expected, acc)), bits(decoded))
    np.testing.assert_array_equal(bits(tensor.mean([expected] * 3)), bits(mean))
    if settled is not None:
        np.testing.assert_array_equal(bits(tensor.settle(expected)), bits(settled))


@pytest.mark.parametrize("spec", SPECS)
def test_has_a_kernel(spec: str) -> None:
    codec = parse(spec)
    assert native.find(getattr(codec, "first", codec), TensorSpec("w", (4096,))) is not None


@pytest.mark.parametrize("spec", SPECS)
def test_same_bits(spec: str) -> None:
    codec = parse(spec)
    for n in LENGTHS:
        for kind, grad in odd_values(n).items():
            if kind == "infinity" and spec.startswith(("ternary", "qsgd", "topk(ratio=0.05)")):
                continue  # infinity / infinity: the step is void, and any code is as good
            same(Tensor(codec, grad, np.float32(0.1) * values.normal(kind, (n,))))
        same(Tensor(codec, values.normal("no residual", (n,)), None))
        for loss_scale in (1024.0, 3.0):
            same(Tensor(codec, values.normal("scaled", (n,)), values.normal("kept", (n,)), loss_scale))


@pytest.mark.parametrize("spec", ["uniform(bits=8)", "uniform(bits=3, symmetric=True)", "sign", "natural", "bf16"])
def test_same_bits_with_a_nan(spec: str) -> None:
    for n in LENGTHS:
        grad = values.normal("nan", (n,))
        grad[n // 3] = np.nan
        same(Tensor(parse(spec), grad, values.normal("kept", (n,))))


@pytest.mark.parametrize("spec", ["uniform(bits=8)", "uniform(bits=5)", "sign(block=64)", "ternary(block=64)",
                                  "log(bits=8)", "topk(ratio=0.1)", "fp16"])
@settings(max_examples=60, deadline=None)
@given(grad=arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32, allow_nan=False,
                                                                              allow_infinity=False)))
def test_same_bits_of_anything(spec: str, grad: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        same(Tensor(parse(spec), grad, np.zeros_like(grad)))


@pytest.mark.parametrize("spec", ["uniform(bits=5)", "sign", "ternary", "qsgd(levels=127)", "natural", "log(bits=8)",
                                  "topk(ratio=0.01)", "randomk(ratio=0.01)"])
def test_threads_change_no_bit(spec: str) -> None:
    n = 4 * (1 << 18) + 1234  # enough for four threads
    tensor = Tensor(parse(spec), values.normal("threads", (n,)), values.normal("kept", (n,)))
    blob = tensor.encode()
    results = [(blob, tensor.settle(blob), tensor.mean([blob] * 3))]
    try:
        for threads in (2, 4):
            kernels.set_threads(threads)
            results.append((tensor.encode(), tensor.settle(blob), tensor.mean([blob] * 3)))
    finally:
        kernels.set_threads(None)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(bits(mine), bits(theirs))


@pytest.mark.parametrize("values_of", ["rising", "falling", "equal", "few large"])
def test_topk_is_exact_for_any_order(values_of: str) -> None:
    """The estimate from a sample and the limited room change nothing."""
    n, k = 300_000, 3000
    x = {"rising": np.arange(n), "falling": np.arange(n)[::-1], "equal": np.ones(n),
         "few large": np.where(np.arange(n) % 1000 == 7, 5.0, 1e-6)}[values_of].astype(np.float32)
    same(Tensor(parse(f"topk(ratio={k / n})"), x.copy(), np.zeros_like(x)))


def test_unaligned_payload() -> None:
    tensor = Tensor(parse("uniform(bits=8)"), values.normal("u", (3000,)), values.normal("kept", (3000,)))
    blob = tensor.encode()
    shifted = np.empty(blob.size + 1, np.uint8)[1:]
    shifted[:] = blob
    np.testing.assert_array_equal(tensor.settle(shifted), tensor.settle(blob))


def test_settings_without_a_kernel_still_work() -> None:
    codec = parse("uniform(bits=3, block=7)")
    assert native.find(codec, TensorSpec("w", (100,))) is None
    same(Tensor(codec, values.normal("odd block", (100,)), values.normal("kept", (100,))))
