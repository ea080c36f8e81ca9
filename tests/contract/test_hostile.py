"""Payloads that no encoder made: an error, never a write outside the tensor."""

from __future__ import annotations

import pytest
import tensorflow as tf

from hvd_gradcomp import parse
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.spec import TensorSpec
from tests.contract import laws
from tests.contract.backends import NUMPY, TENSORFLOW, TORCH, Backend
from tests.contract.specs import ALL

WITH_INDICES = [spec for spec in ALL if any(part.name.split("/")[-1] == "indices" and part.dtype == "int32"
                                            for part in parse(spec).layout(TensorSpec("", (41,))))]
TENSORFLOWS_OWN = tf.errors.InvalidArgumentError


@pytest.mark.parametrize("backend", [NUMPY, TORCH], ids=str)
@pytest.mark.parametrize("spec", WITH_INDICES)
def test_refuses_outside_indices(spec: str, backend: Backend) -> None:
    laws.refuses_outside_indices(parse(spec), backend)


@pytest.mark.parametrize("spec", WITH_INDICES)
def test_tensorflow_refuses_outside_indices(spec: str) -> None:
    laws.refuses_outside_indices(parse(spec), TENSORFLOW, TENSORFLOWS_OWN)


@pytest.mark.parametrize("backend", [NUMPY, TORCH, TENSORFLOW], ids=str)
@pytest.mark.parametrize("spec", ALL)
def test_survives_any_bytes(spec: str, backend: Backend) -> None:
    """Not on torch devices: there an index is checked by the device itself, which ends the process."""
    errors = (TENSORFLOWS_OWN,) if backend is TENSORFLOW else (PayloadError,)
    laws.survives_any_bytes(parse(spec), backend, errors)
