"""Bytes that no encoder made, and arrays that do not fit: an error before memory is touched. `make test-asan` runs
this under the sanitizers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from hvd_gradcomp import kernels, parse
from hvd_gradcomp.errors import PayloadError
from tests.contract import values
from tests.kernels.world import SPECS, Tensor

INPUTS = int(os.environ.get("HVD_GRADCOMP_FUZZ", "20"))
Work = Callable[[Any], Any]


@pytest.mark.parametrize("spec", SPECS)
def test_any_bytes(spec: str) -> None:
    """Random and mutated payloads: a value or a PayloadError; and whatever lies beside the tensor stays."""
    rng = np.random.default_rng(3)
    with np.errstate(all="ignore"):
        for n in (9, 1000, 5003):
            guarded = np.full(n + 32, 7.0, np.float32)
            tensor = Tensor(parse(spec), values.normal("hostile", (n,)), values.normal("kept", (n,)))
            blob = tensor.encode()
            for i in range(INPUTS):
                hostile = rng.integers(0, 256, blob.size).astype(np.uint8)
                if i % 2:
                    hostile = blob.copy()
                    hostile[rng.integers(0, blob.size, 3)] ^= np.uint8(1 << rng.integers(0, 8))
                acc = guarded[16:-16]
                for work in (lambda t=tensor, b=hostile: t.settle(b), lambda t=tensor, b=hostile: t.mean([b] * 3),
                             lambda t=tensor, b=hostile, a=acc: t.decode(b, a)):
                    with suppress(PayloadError):
                        assert work().shape == (n,)
                assert (guarded[:16] == 7.0).all() and (guarded[-16:] == 7.0).all()


NINE, ONE = np.zeros(9, np.float32), np.ones(1, np.float32)


@pytest.mark.parametrize("work", [
    lambda m: m.decode_indices(np.full(2, 255, np.uint8), np.zeros(7, np.uint8), 1000, 5),
    lambda m: m.scatter(NINE, None, 1.0, None, np.array([9], np.int32), ONE, 1.0, 1),
    lambda m: m.scatter(NINE, NINE, 1.0, None, np.array([9], np.int32), ONE, 1.0, 1),
    lambda m: m.scatter(NINE, None, 1.0, None, np.array([-1], np.int32), ONE, 1.0, 1),
    lambda m: m.gather(NINE, None, 1.0, None, np.array([9], np.int32), ONE.copy()),
    lambda m: m.encode_indices(np.array([4, 4], np.int32), 9, np.zeros(1, np.uint8), np.zeros(2, np.uint8))])
def test_indices_outside_are_refused(work: Work) -> None:
    with pytest.raises(IndexError):
        work(kernels.load()[0])


@pytest.mark.parametrize(("work", "error"), [
    (lambda m: m.Sign(100, 64, np.zeros(1, np.float32), np.zeros(13, np.uint8)), ValueError),  # two blocks
    (lambda m: m.Sign(100, 64, np.zeros(2, np.float64), np.zeros(13, np.uint8)), TypeError),
    (lambda m: m.Sign(100, 7, np.zeros(15, np.float32), np.zeros(13, np.uint8)), ValueError),
    (lambda m: m.Sign(100, 64, np.zeros(2, np.float32), np.zeros(26, np.uint8)[::2]), TypeError),
    (lambda m: m.select(np.zeros(4, np.float32), None, 1.0, None, np.zeros(5, np.int32), 1), ValueError),
    (lambda m: m.rows_times(np.zeros(6, np.float32), None, 1.0, None, 2, 4, np.zeros(4, np.float32), 1,
                            np.zeros(2, np.float32), 1), ValueError)])
def test_arrays_that_do_not_fit_are_refused(work: Work, error: type[Exception]) -> None:
    with pytest.raises(error):
        work(kernels.load()[0])


def test_a_read_only_residual_is_refused() -> None:
    x = np.zeros(8, np.float32)
    frozen = x.copy()
    frozen.flags.writeable = False
    signs = kernels.load()[0].Sign(8, 8, np.ones(1, np.float32), np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        signs.decode(frozen, x, 1.0, None, 1)
