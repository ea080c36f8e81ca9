"""Every example that trains runs on two ranks over Gloo and over MPI, for one short epoch, and reports what it sent.

What they learn is the matter of ``make demo``, ``make dgc`` and ``test_convergence.py``.
"""

import json
import math
import sys
from pathlib import Path

import pytest

from .launch import ROOT, horovodrun

EXAMPLES = {
    "pytorch_mnist.py": ["--compression", "topk(ratio=0.01)", "--batch-size", "500"],
    "tensorflow2_mnist.py": ["--compression", "uniform(bits=4)", "--batch-size", "500"],
    "keras_mnist.py": ["--compression", "powersgd(rank=2)", "--batch-size", "500"],
    "keras_dgc.py": ["--ratio", "0.01", "--warmup-epochs", "0", "--batch-size", "500"],
    "pytorch_dgc.py": ["--ratio", "0.01", "--warmup-epochs", "0", "--value-codec", "uniform(bits=8)", "--batch-size",
                       "1000"],
    "pytorch_language_model.py": ["--ratio", "0.01", "--warmup-epochs", "0", "--steps", "4"],
}
OTHERS = {"elastic_pytorch.py": "test_elastic.py", "mpi_numpy.py": "test_mpi_example.py", "compare.py": "make demo"}
SHARED = {"common.py", "data.py", "launch.py", "plot.py", "text.py"}


def test_all_examples_are_run() -> None:
    files = {file.name for file in (ROOT / "examples").glob("*.py")}
    assert files == EXAMPLES.keys() | OTHERS.keys() | SHARED


@pytest.mark.np2
@pytest.mark.parametrize("transport", ["gloo", "mpi"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs(name: str, transport: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    run = horovodrun(2, transport, [sys.executable, str(ROOT / "examples" / name), *EXAMPLES[name], "--epochs", "1",
                                    "--json", str(file)], timeout=240)
    assert run.returncode == 0, run.stdout[-3000:]
    result = json.loads(file.read_text())
    assert result["ranks"] == 2 and result["steps"] > 0 and math.isfinite(result["loss"])
    assert result["sent_ratio"] > 3, "nothing was compressed"
    assert "times fewer bytes" in run.stdout
