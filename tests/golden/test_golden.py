"""Every backend encodes to the committed bytes and decodes them to the committed values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_gradcomp.ops.base import ITEMSIZE
from tests.contract import values
from tests.contract.backends import BACKENDS, Backend
from tests.golden import files

CASES = tuple(files.inputs())


def _array(text: str, dtype: str) -> Any:
    return np.frombuffer(bytes.fromhex(text), dtype)


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each.name != "tensorflow-graph"], ids=str)
@pytest.mark.parametrize("spec", files.SPECS)
def test_golden(spec: str, backend: Backend) -> None:
    """TensorFlow eagerly; its traced graphs are compared with numpy in tests/contract."""
    golden = files.load(spec)
    assert golden["spec"] == spec
    for name, x in files.inputs().items():
        case = golden[name]
        assert case["input"] == x.tobytes().hex(), "the inputs have changed: run 'make golden'"
        codec = files.single(spec, x.size, backend)
        assert case["layout"] == [[part.name, part.length, part.dtype] for part in codec.layout]
        payload = codec.encode(x, files.STEP)
        assert payload.tobytes().hex() == case["payload"], f"{name}: {backend} encodes other bytes"
        decoded = codec.decode(_array(case["payload"], "uint8"), x, files.STEP)
        right = values.flush(_array(case["decoded"], "<f4"))
        assert np.array_equal(values.flush(decoded), right), f"{name}: {backend} decodes other values"


@pytest.mark.parametrize("spec", files.SPECS)
def test_a_file_says_how_long_it_is(spec: str) -> None:
    """The bytes of the layout and those of the payload were counted separately."""
    golden = files.load(spec)
    for name in CASES:
        parts = sum(length * ITEMSIZE[dtype] for _, length, dtype in golden[name]["layout"])
        assert len(golden[name]["payload"]) // 2 == -(-parts // 4) * 4
    assert files.path(spec).stat().st_size < 8192


def test_there_is_one_file_for_each_spec() -> None:
    assert len({files.path(spec) for spec in files.SPECS}) == len(files.SPECS)
    assert {path.name for path in files.FOLDER.glob("*.json")} == {files.path(spec).name for spec in files.SPECS}


def test_a_missing_file_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="make golden"):
        files.load("sign")
    assert not list(tmp_path.iterdir())


def test_an_altered_file_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    altered = files.text("sign").replace(files.content("sign")["odd"]["payload"], "00" * 12)
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    files.path("sign").write_text(altered, encoding="utf-8")
    with pytest.raises(AssertionError, match="encodes other bytes"):
        test_golden("sign", BACKENDS[0])
