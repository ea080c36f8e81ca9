"""The short version of ``make convergence``: real data, same seed, 2 ranks, codecs that differ in kind."""

import json
import sys
from pathlib import Path

import pytest

from .launch import ROOT, horovodrun

SPECS = ["fp16", "uniform(bits=4)", "topk(ratio=0.01)", "powersgd(rank=4)"]


def accuracy(spec: str, folder: Path) -> float:
    file = folder / "run.json"
    run = horovodrun(2, "gloo", [sys.executable, str(ROOT / "examples" / "pytorch_mnist.py"), "--compression", spec,
                                 "--epochs", "5", "--json", str(file)], timeout=300)
    assert run.returncode == 0, run.stdout[-3000:]
    return float(json.loads(file.read_text())["accuracy"])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> float:
    return accuracy("none", tmp_path_factory.mktemp("dense"))


@pytest.mark.np2
@pytest.mark.parametrize("spec", SPECS)
def test_accuracy_stays(spec: str, dense: float, tmp_path: Path) -> None:
    """After half the epochs of the full comparison accuracies still move, so two points are allowed."""
    assert dense > 0.93, "the uncompressed run itself did not learn"
    assert accuracy(spec, tmp_path) >= dense - 0.02
