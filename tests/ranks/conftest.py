"""Runs inside every rank that tests/parallel starts; never in a plain ``pytest tests``.

All ranks run the same tests in the same order. A rank that fails writes its report and leaves at
once, which ends the job: its peers would wait in a collective for ever. Outcomes go to one file per
rank, because the launchers mix what ranks print.
"""

import json
import os
import sys
from pathlib import Path

import pytest

RESULTS = os.environ.get("HVD_GRADCOMP_RESULTS")
if RESULTS is None:
    collect_ignore_glob = ["*"]

_reports: list[dict[str, str]] = []


def _rank() -> int:
    return int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "-1")))


def _write(done: bool) -> None:
    file = Path(RESULTS or ".") / f"rank{_rank()}.json"
    file.write_text(json.dumps({"done": done, "tests": _reports}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _reports.append({"test": report.nodeid, "outcome": report.outcome, "text": report.longreprtext})
    if report.outcome == "failed":
        _write(done=False)
        sys.stderr.write(f"rank {_rank()}: {report.nodeid} failed\n{report.longreprtext}\n")
        sys.stderr.flush()
        os._exit(1)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == "failed":
        _reports.append({"test": report.nodeid, "outcome": "failed", "text": report.longreprtext})
        _write(done=False)
        os._exit(1)


def pytest_sessionfinish() -> None:
    if RESULTS is not None:
        _write(done=True)


@pytest.fixture(autouse=True)
def together(hvd):
    """Every test starts and ends with all ranks at the same place."""
    assert hvd.size() == int(os.environ["HVD_GRADCOMP_NP"]), "the world is not the one that was asked for"
    hvd.allreduce(_one(hvd), name="test.begin")
    yield
    hvd.allreduce(_one(hvd), name="test.end")


def _one(hvd):
    if "torch" in hvd.__name__:
        import torch

        return torch.ones(1)
    import tensorflow as tf

    return tf.ones(1)
