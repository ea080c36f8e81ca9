"""The laboratory's lists and page; the network itself needs root and is measured by `make lab`."""

import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hvd_gradcomp import parse
from hvd_gradcomp.exchange import choose
from hvd_gradcomp.spec import TensorSpec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "lab"))

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return module


def test_models_have_their_published_sizes(lab: Any) -> None:
    sizes = {name: (len(shapes), sum(map(math.prod, shapes)))
             for name, shapes in ((name, model()) for name, model in lab("cases").MODELS.items())}
    assert sizes == {"40 MB": (10, 10_000_000), "ResNet-50": (161, 25_557_032), "BERT-base": (199, 109_482_240)}


def test_more_hosts_compare_exchanges(lab: Any) -> None:
    two, four = lab("cases").rows(2), lab("cases").rows(4)
    assert set(two) < set(four)
    matrix = TensorSpec("w", (1000, 1000))
    for spec, exchange in set(four) - set(two):
        assert choose(parse(spec), matrix, 4, exchange).name == exchange != choose(parse(spec), matrix, 4).name


def row(codec: str, seconds: float, mbit: int) -> dict[str, Any]:
    return {"where": "network", "mbit": mbit, "model": "40 MB", "codec": codec, "ranks": 2, "numbers": 10**7,
            "tensors": 10, "exchange": "" if codec.startswith("dense") else "auto", "steps": 3,
            "first_step_only": False,
            "seconds": seconds, "encode": 0.0, "wait": seconds, "decode": 0.0, "expected": 4e7, "counted_rx": 4.1e7}


def trained(mbit: int, reached: bool, step: float) -> dict[str, Any]:
    return {"framework": "torch", "codec": "sign", "ranks": 2, "target": 0.92, "mbit": mbit, "reached": reached,
            "steps": 101 if reached else 21, "step_seconds": step, "seconds": 100 * step, "counted_rx": 3e5}


@pytest.fixture
def measured() -> dict[str, Any]:
    rows = [row(codec, seconds / mbit, mbit) for mbit in (100, 1000, 10000)
            for codec, seconds in (("dense fp32", 600), ("dense fp16", 300), ("sign", 20), ("uniform(bits=8)", 301))]
    return {"made": "2026-01-01T00:00", "quick": True, "minutes": 1.0, "load_before": 0.0,
            "together": 0.8, "cores": 2, "processor": "P",
            "python": "3.11", "kernel": "6", "env": [], "transport": "mpi", "exchange": rows,
            "training": [trained(10000, True, 0.01), trained(100, False, 0.5)]}


def test_page_says_what_was_reached_and_what_was_missed(lab: Any, measured: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "results.json"
    source.write_text(json.dumps(measured))
    files = list(lab("page").write(measured, source, tmp_path))
    text = (tmp_path / "results.md").read_text()
    assert {file.name for file in files} == {"results.md", "results-exchange.png", "results-training.png"}
    assert "| `sign` | 30.0 of 25 reached | 30.0 of 15 reached | 30.0 of 4 reached |" in text
    assert "| `uniform(bits=8)` | 2.0 of 3.5 **missed** | 2.0 of 3 **missed** | 2.0 of 2 **missed** |" in text
    assert "Slower than stock fp16: `uniform(bits=8)` at 100 Mbit/s," in text


def test_page_says_which_half_is_of_an_earlier_call(lab: Any, measured: dict[str, Any], tmp_path: Path) -> None:
    page, source = lab("page"), tmp_path / "results.json"
    source.write_text(json.dumps(measured))
    measured["kept"] = {"part": "training"} | {name: measured[name] for name in page.ORIGIN}
    measured["quick"] = False
    list(page.write(measured, source, tmp_path))
    text = (tmp_path / "results.md").read_text()
    assert "`python benchmarks/lab --only exchange` made this page" in text
    assert "The training part was made before, by `python benchmarks/lab --quick` in 1 minutes" in text


def test_time_to_target_is_computed_where_it_was_not_reached(lab: Any, measured: dict[str, Any]) -> None:
    fast, slow = measured["training"]
    time = lab("page")._time_to_target
    assert time(measured, fast) == (1.0, False)
    assert time(measured, slow) == (50.0, True)


def test_readme_gets_the_table(lab: Any, measured: dict[str, Any], tmp_path: Path) -> None:
    page = lab("page")
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    list(page.write(measured, tmp_path / "docs" / "results.json", tmp_path))
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| `sign` | 200 ms, 30.0 x | 20.0 ms, 30.0 x | 2.0 ms, 30.0 x |" in text
    assert page.BEGIN in (ROOT / "README.md").read_text()


def test_network_needs_root(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = lab("net")
    monkeypatch.setattr(net.os, "geteuid", lambda: 1000)
    with pytest.raises(net.NetworkError, match="root"), net.Network(2):
        pass
