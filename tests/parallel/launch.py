"""Start Horovod ranks with a time limit that really ends them, and collect what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

# OpenMPI refuses root and more ranks than cores unless told so; waiting ranks must not burn the
# cores the others need; a stalled collective must end the job.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "20", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60", "HOROVOD_CYCLE_TIME": "1",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
}


def horovodrun(ranks: int, transport: str, command: Sequence[str], *, timeout: float,
               env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``command`` on ``ranks`` ranks over ``gloo`` or ``mpi``.

    Raises AssertionError with the output's end when the ranks are not done after ``timeout``
    seconds; every process of the job is dead then.
    """
    launcher = [str(BIN / "horovodrun"), "-np", str(ranks), f"--{transport}"]
    if transport == "mpi":
        launcher += ["--mpi-args=--oversubscribe"]
    return _run(launcher, command, timeout, env)


def mpirun(ranks: int, command: Sequence[str], *, timeout: float,
           env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """:func:`horovodrun` for programs without Horovod."""
    return _run([str(BIN / "mpirun"), "-np", str(ranks), "--oversubscribe"], command, timeout, env)


def _run(launcher: list[str], command: Sequence[str], timeout: float,
         env: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, **ENVIRONMENT, **(env or {})}
    full["PATH"] = f"{BIN}{os.pathsep}{full.get('PATH', '')}"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([*launcher, *command], cwd=ROOT, env=full, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_tree(process)
        output.seek(0)
        text = output.read()
    assert code is not None, f"not done after {timeout} s: {' '.join(command)}\n{text[-6000:]}"
    return subprocess.CompletedProcess(command, code, text)


def run_tests(folder: str, ranks: int, transport: str, *, timeout: float,
              env: Mapping[str, str] | None = None) -> int:
    """Run the tests of ``tests/ranks/<folder>`` inside ``ranks`` ranks; how many passed on each.

    ``transport``: ``gloo`` or ``mpi`` under Horovod, or ``mpirun``.
    Raises AssertionError with the ranks' own reports if any fails, or ran other tests than its peers.
    """
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "pytest", f"tests/ranks/{folder}", "-x", "-q", "-p", "no:cacheprovider",
                   "--timeout=120", "--timeout-method=thread"]
        full = {"HVD_GRADCOMP_RESULTS": results, "HVD_GRADCOMP_NP": str(ranks), **(env or {})}
        if transport == "mpirun":
            run = mpirun(ranks, command, timeout=timeout, env=full)
        else:
            run = horovodrun(ranks, transport, command, timeout=timeout, env=full)
        files = sorted(Path(results).glob("rank*.json"))
        reports = [json.loads(file.read_text()) for file in files]
    bad = [f"{file.name}: {test['test']} {test['outcome']}\n{test['text']}"
           for file, report in zip(files, reports, strict=True) for test in report["tests"]
           if test["outcome"] != "passed"]
    assert not bad, "\n".join(bad)
    assert run.returncode == 0, f"exit {run.returncode}\n{run.stdout[-6000:]}"
    assert len(reports) == ranks and all(report["done"] for report in reports), run.stdout[-6000:]
    passed = [[test["test"] for test in report["tests"]] for report in reports]
    assert passed[0] and all(names == passed[0] for names in passed), f"ranks ran different tests: {passed}"
    return len(passed[0])


def _kill_tree(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End a launcher and everything it started (its children have process groups of their own)."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    for child in family:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
