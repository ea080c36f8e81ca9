"""The closed list of array operations: the rules of ``ops/base.py`` hold in every framework, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.ops.torch import TorchOps
from tests.contract import values
from tests.contract.backends import BACKENDS, TENSORFLOW, TENSORFLOW_GRAPH, Backend

EVERYWHERE = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def run(backend: Backend, function: Callable[..., Array], *arrays: NDArray[Any]) -> NDArray[Any]:
    """``function(ops, *arrays)`` as the framework runs it."""
    compiled = backend.compiled(lambda *arrays: function(backend.ops, *arrays))
    return backend.numpy(compiled(*[backend.array(array) for array in arrays]))


@EVERYWHERE
@pytest.mark.parametrize("n", [3, 7, 10, 15, 41, 255, 1000.0, 65535])
def test_division_is_no_multiplication_by_an_inverse(backend: Backend, n: float) -> None:
    x = values.normal("division", (10_000,))
    assert (x * (np.float32(1) / np.float32(n)) != x / np.float32(n)).any()
    assert run(backend, lambda ops, x: ops.divide(x, n), x).tobytes() == (x / np.float32(n)).tobytes()


@EVERYWHERE
def test_accumulate_keeps_its_order(backend: Backend) -> None:
    """Also where a graph optimizer would merge a chain of additions."""
    arrays = [values.normal(f"accumulate/{i}", (5000,)) * np.float32(10.0 ** (i % 3)) for i in range(5)]

    def add(ops: Ops, *arrays: Array) -> Array:
        acc = ops.zeros((5000,))
        for array in arrays:
            acc = ops.accumulate(acc, array)
        return acc

    expected = np.zeros(5000, np.float32)
    for array in arrays:
        expected = expected + array
    assert run(backend, add, *arrays).tobytes() == expected.tobytes()
    reordered = ((arrays[4] + arrays[3]) + (arrays[2] + arrays[1])) + arrays[0]
    assert reordered.tobytes() != expected.tobytes(), "no order would show"


@EVERYWHERE
def test_rint_rounds_half_to_even(backend: Backend) -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 8388609.0], np.float32)
    assert run(backend, lambda ops, x: ops.rint(x), x).tolist() == [-2, -2, 0, 0, 2, 2, 0, 8388609]


@EVERYWHERE
def test_float16_rounds_half_to_even(backend: Backend) -> None:
    x = np.array([1.00048828125, 1.00146484375, 65519.0, 2.0**-25, 2.0**-24, 1.5 * 2.0**-24], np.float32)
    right = np.array([1.0, 1.001953125, 65504.0, 0.0, 2.0**-24, 2.0**-23], np.float16)
    assert run(backend, lambda ops, x: ops.cast(x, "float16"), x).tobytes() == right.tobytes()


@EVERYWHERE
def test_shifts_are_logical_and_products_wrap(backend: Backend) -> None:
    x = np.array([-1, -2, 5, -(2**31)], np.int32)
    wide = x.view(np.uint32).astype(object)
    for bits in (0, 1, 16, 31):
        right = run(backend, lambda ops, x, bits=bits: ops.shift_right(x, bits), x)
        assert right.view(np.uint32).tolist() == [value >> bits for value in wide]
        left = run(backend, lambda ops, x, bits=bits: ops.shift_left(x, bits), x)
        assert left.view(np.uint32).tolist() == [value << bits & 0xFFFFFFFF for value in wide]
    product = run(backend, lambda ops, x: x * 0x7FEB352D, x)
    assert product.view(np.uint32).tolist() == [value * 0x7FEB352D & 0xFFFFFFFF for value in wide]


@EVERYWHERE
@pytest.mark.parametrize("n", [1, 2, 3, 8, 100])
def test_sum_rows_adds_in_one_order(backend: Backend, n: int) -> None:
    x = values.normal("sum", (3, n)) * np.float32(100)
    halves = np.zeros((3, 1 << (n - 1).bit_length()), np.float32)
    halves[:, :n] = x
    while halves.shape[1] > 1:
        middle = halves.shape[1] // 2
        halves = halves[:, :middle] + halves[:, middle:]
    assert run(backend, lambda ops, x: ops.sum_rows(x), x).tobytes() == halves.tobytes()


@EVERYWHERE
def test_flush(backend: Backend) -> None:
    x = np.array([1e-40, -1e-40, -0.0, 2.0**-126, -(2.0**-126), 3.0, np.nan, -np.inf], np.float32)
    right = np.array([0.0, 0.0, 0.0, 2.0**-126, -(2.0**-126), 3.0, np.nan, -np.inf], np.float32)
    flushed = run(backend, lambda ops, x: ops.flush(x), x)
    assert np.array_equal(flushed, right, equal_nan=True) and not np.signbit(flushed[:3]).any()


@EVERYWHERE
def test_pad(backend: Backend) -> None:
    x = np.array([1.0, 2.0], np.float32)
    assert run(backend, lambda ops, x: ops.pad(x, 4), x).tolist() == [1, 2, 0, 0]
    assert run(backend, lambda ops, x: ops.pad(x, 4, edge=True), x).tolist() == [1, 2, 2, 2]
    assert run(backend, lambda ops, x: ops.pad(x, 2), x).tolist() == [1, 2]


@EVERYWHERE
def test_bitcast(backend: Backend) -> None:
    x = np.arange(12, dtype=np.uint8)
    for dtype in ("float32", "int32", "int16", "float16", "uint8"):
        there = run(backend, lambda ops, x, dtype=dtype: ops.bitcast(x, dtype), x)
        assert str(there.dtype) == dtype and there.tobytes() == x.tobytes()
        assert run(backend, lambda ops, x: ops.bitcast(x, "uint8"), there).tobytes() == x.tobytes()
    every_other = run(backend, lambda ops, x: ops.bitcast(x[::2], "int16"), x)
    assert every_other.tobytes() == x[::2].tobytes()


@EVERYWHERE
def test_finiteness_and_verdicts(backend: Backend) -> None:
    for bad in (np.nan, np.inf, -np.inf, None):
        x = np.ones(7, np.float32)
        if bad is not None:
            x[3] = bad
        ok = run(backend, lambda ops, x: ops.all_finite(x), x)
        assert ok.tolist() == [float(bad is None)] and ok.dtype == np.float32
    assert run(backend, lambda ops, x: ops.all_finite(x), np.zeros(0, np.float32)).tolist() == [1.0]
    for verdict in (0.0, 1.0):
        ok = np.array([verdict], np.float32)
        out = run(backend, lambda ops, x, ok: ops.poison(x, ok), np.ones(3, np.float32), ok)
        assert np.isnan(out).all() if verdict == 0.0 else out.tolist() == [1.0, 1.0, 1.0]
        for target in (backend.state(backend.array(np.array([np.nan, -0.0, 1e-40], np.float32))),):
            before = backend.numpy(target).tobytes()
            backend.ops.assign(target, backend.array(np.array([np.inf, 1.0, 2.0], np.float32)), backend.array(ok))
            after = np.array([np.inf, 1.0, 2.0], np.float32).tobytes() if verdict else before
            assert backend.numpy(target).tobytes() == after


@EVERYWHERE
def test_scatter_add_adds_duplicates(backend: Backend) -> None:
    indices, added = np.array([2, 0, 2], np.int32), np.array([1.0, 5.0, 3.0], np.float32)
    out = run(backend, lambda ops, i, v: ops.scatter_add(ops.zeros((4,)), i, v), indices, added)
    assert out.tolist() == [5.0, 0.0, 4.0, 0.0]


# -- top_indices --------------------------------------------------------------------------------------------------


def top(keys: list[int], k: int) -> list[int]:
    """By sorting: larger first, of equal ones the lower index."""
    return sorted(sorted(range(len(keys)), key=lambda i: (-keys[i], i))[:k])


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each is not TENSORFLOW_GRAPH], ids=str)
@given(keys=st.lists(st.integers(0, 3) | st.integers(0, 2**31 - 1), min_size=1, max_size=30), data=st.data())
def test_top_indices(backend: Backend, keys: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(keys) + 1))
    chosen = backend.numpy(backend.ops.top_indices(backend.array(np.array(keys, np.int32)), k))
    assert chosen.dtype == np.int32 and chosen.tolist() == top(keys, k)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("k", [1, 3, 50, 99, 100])
def test_top_indices_of_ties(backend: Backend, k: int) -> None:
    for keys in ([7] * 100, [0] * 100, list(range(100)), [i % 3 for i in range(100)], [2**31 - 1, 0] * 50):
        chosen = run(backend, lambda ops, x: ops.top_indices(x, k), np.array(keys, np.int32))
        assert chosen.tolist() == top(keys, k)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_top_indices_of_bits_orders_magnitudes(backend: Backend) -> None:
    """Keys made of a float32's bits: denormals, zeros of both signs and the largest values keep their order."""
    x = np.array([0.0, 1e-45, -1e-40, 2.0**-126, -1.0, 3.4e38, -0.0, 1e-39], np.float32)
    for k in range(1, 9):
        keys = (x.view(np.int32) & 0x7FFFFFFF).astype(np.int32)
        right = top(np.abs(x.astype(np.float64)).tolist(), k)
        assert run(backend, lambda ops, keys, k=k: ops.top_indices(keys, k), keys).tolist() == right


def test_backends_are_what_they_say() -> None:
    """The device branch of torch and the graph of TensorFlow are really taken."""
    device = next(each for each in BACKENDS if each.name == "torch-device")
    assert isinstance(device.ops, TorchOps) and device.ops.device.type != "cpu"
    traced: list[bool] = []

    def probe(ops: Ops, x: Array) -> Array:
        traced.append(hasattr(x, "numpy"))
        return x

    for backend in (TENSORFLOW, TENSORFLOW_GRAPH):
        run(backend, probe, np.ones(1, np.float32))
    assert traced == [True, False]
