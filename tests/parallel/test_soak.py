"""The short version of ``make soak``: mixed codecs, memory flat, ranks equal, nothing lost."""

import sys

import pytest

from .launch import ROOT, horovodrun


@pytest.mark.np2
def test_nothing_creeps() -> None:
    run = horovodrun(2, "gloo", [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--steps", "100"], timeout=300,
                     env={"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0 and "ok: memory grew by" in run.stdout, run.stdout[-3000:]
