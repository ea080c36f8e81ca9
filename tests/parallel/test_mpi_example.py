"""The example without Horovod learns on four ranks, compressed as well as not."""

import json
import sys
from pathlib import Path

import pytest

from .launch import ROOT, mpirun

SPECS = [("none", "auto"), ("topk(ratio=0.02)", "sparse_split"), ("uniform(bits=4)", "two_stage")]


@pytest.mark.np4
@pytest.mark.parametrize(("spec", "exchange"), SPECS)
def test_it_learns(spec: str, exchange: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    run = mpirun(4, [sys.executable, str(ROOT / "examples" / "mpi_numpy.py"), "--compression", spec, "--exchange",
                     exchange, "--json", str(file)], timeout=200)
    assert run.returncode == 0, run.stdout[-3000:]
    result = json.loads(file.read_text())
    assert result["ranks"] == 4 and result["accuracy"] > 0.87
