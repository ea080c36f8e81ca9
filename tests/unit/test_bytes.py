"""Bit packing, the layout of payloads, the random generator: against slow references in plain Python."""

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_gradcomp import payload
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import bits, rng
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.ops.tensorflow import TensorflowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.payload import Part
from hvd_gradcomp.spec import TensorSpec

BACKENDS = [(NumpyOps(), np.asarray), (TorchOps(), torch.from_numpy), (TensorflowOps(), tf.constant)]
IDS = ["numpy", "torch", "tensorflow"]
NUMPY = NumpyOps()


@st.composite
def codes_of_a_width(draw):
    width = draw(st.integers(1, 16))
    return width, draw(st.lists(st.integers(0, 2**width - 1), max_size=70))


@given(codes_of_a_width())
def test_packing_is_a_stream_of_bits_lowest_first(drawn) -> None:
    width, codes = drawn
    stream = sum(code << (i * width) for i, code in enumerate(codes))
    want = stream.to_bytes(bits.packed_nbytes(len(codes), width), "little")
    packed = bits.pack(NUMPY, np.array(codes, np.int32), width)
    assert packed.tobytes() == want
    assert bits.unpack(NUMPY, packed, len(codes), width).tolist() == codes


@pytest.mark.parametrize(("ops", "array"), BACKENDS, ids=IDS)
@pytest.mark.parametrize("width", range(1, 17))
def test_packing_is_the_same_in_every_framework(ops, array, width) -> None:
    codes = np.random.default_rng(width).integers(0, 2**width, 101).astype(np.int32)
    packed = bits.pack(ops, array(codes), width)
    assert np.asarray(packed).tobytes() == bits.pack(NUMPY, codes, width).tobytes()
    np.testing.assert_array_equal(np.asarray(bits.unpack(ops, packed, 101, width)), codes)


LAYOUT = (Part("bytes", 3, "uint8"), Part("halves", 3, "float16"), Part("floats", 2, "float32"),
          Part("none", 0, "int32"))


def parts_of(array) -> dict:
    return {"bytes": array(np.array([1, 2, 3], np.uint8)), "halves": array(np.array([0.5, -1, 2], np.float16)),
            "floats": array(np.array([1.5, -2.5], np.float32)), "none": array(np.zeros(0, np.int32))}


@pytest.mark.parametrize(("ops", "array"), BACKENDS, ids=IDS)
def test_payload_puts_wide_items_first_and_ends_on_four_bytes(ops, array) -> None:
    blob = payload.pack(ops, parts_of(array), LAYOUT)
    want = (np.array([1.5, -2.5], np.float32).tobytes() + np.array([0.5, -1, 2], np.float16).tobytes()
            + bytes([1, 2, 3]) + bytes(3))
    assert np.asarray(blob).tobytes() == want and payload.nbytes(LAYOUT) == len(want) == 20
    for name, part in payload.unpack(ops, blob, LAYOUT).items():
        np.testing.assert_array_equal(np.asarray(part), np.asarray(parts_of(array)[name]))


@pytest.mark.parametrize(("ops", "array"), BACKENDS, ids=IDS)
@pytest.mark.parametrize("wrong", [np.zeros(19, np.uint8), np.zeros(21, np.uint8), np.zeros(0, np.uint8),
                                   np.zeros(20, np.int16), np.zeros((20, 1), np.uint8)])
def test_a_buffer_of_another_size_or_kind_is_refused(ops, array, wrong) -> None:
    with pytest.raises(PayloadError, match="expected 20 bytes"):
        payload.unpack(ops, array(wrong), LAYOUT)


@pytest.mark.parametrize("change", [{"halves": np.zeros(4, np.float16)}, {"halves": np.zeros(3, np.float32)},
                                    {"more": np.zeros(1, np.uint8)}])
def test_parts_that_are_not_the_layout_are_not_packed(change) -> None:
    with pytest.raises(PayloadError):
        payload.pack(NUMPY, {**parts_of(np.asarray), **change}, LAYOUT)


def mix(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def draw(ops, n: int = 4000, **changes) -> np.ndarray:
    arguments = {"seed": 1, "spec": TensorSpec("w", (n,)), "step": 5, "rank": 2, "stream": 0} | changes
    step = arguments.pop("step")
    return np.asarray(rng.random_bits(ops, n, step=ops.constant([step], "int32"), **arguments))


@pytest.mark.parametrize("ops", [ops for ops, _ in BACKENDS], ids=IDS)
def test_random_bits_are_those_of_the_definition(ops) -> None:
    key = 0
    for word in (1, 0, TensorSpec("w", ()).crc, 2, 0):
        key = (mix((key ^ word) & 0xFFFFFFFF) + 0x9E3779B9) & 0xFFFFFFFF
    first = mix((5 + key) & 0xFFFFFFFF)
    second = mix((first + 0x9E3779B9) & 0xFFFFFFFF)
    want = [mix((mix(i ^ first) + second & 0xFFFFFFFF) ^ first) for i in range(50)]
    assert draw(ops)[:50].view(np.uint32).tolist() == want


@pytest.mark.parametrize("change", [{"seed": 2}, {"seed": 1 + (1 << 32)}, {"step": 6}, {"rank": 3},
                                    {"rank": rng.SHARED}, {"stream": 1}, {"spec": TensorSpec("v", (4000,))}])
def test_anything_else_gives_unrelated_bits(change) -> None:
    ones = np.unpackbits((draw(NUMPY) ^ draw(NUMPY, **change)).view(np.uint8)).mean()
    assert abs(ones - 0.5) < 5 * 0.5 / (4000 * 32) ** 0.5


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    n = 200_000
    u = rng.uniform(NUMPY, n, seed=3, spec=TensorSpec("w", (n,)), step=np.zeros(1, np.int32), rank=0)
    assert u.min() >= 0 and u.max() < 1
    counts = np.bincount((u * 100).astype(int), minlength=100)
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 99 + 5 * (2 * 99) ** 0.5  # chi-square, 5 sigma
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / n**0.5
