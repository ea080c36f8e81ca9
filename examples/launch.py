"""Start an example on several Horovod ranks, with a time limit that ends all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

# Ranks on one machine share its cores: one thread each, and an MPI rank that waits gives its core up.
# OpenMPI wants to be told that running as root (in a container) is meant.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
_PREFIX = re.compile(r"\[\d+(?:,\d+)?\]<std(?:out|err)>:")  # horovodrun puts it before every line


class LaunchError(RuntimeError):
    """A launch that failed or took too long; the message ends with what it printed last."""


def horovodrun(ranks: int, transport: str, script: Path, arguments: Sequence[str], *, timeout: float, log: Path,
               on_line: Callable[[str], None]) -> None:
    """Run ``script`` on ``ranks`` ranks over ``gloo`` or ``mpi``, keep its output in ``log``.

    ``on_line`` gets every line as it comes, each step of a progress bar too.
    Raises LaunchError; every process of the launch has ended by then.
    """
    bin_folder = Path(sys.executable).parent
    command = [str(bin_folder / "horovodrun"), "-np", str(ranks), f"--{transport}"]
    if transport == "mpi":
        command += ["--mpi-args=--oversubscribe"]
    command += [sys.executable, str(script), *arguments]
    environment = {**os.environ, **ENVIRONMENT, "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    reader = threading.Thread(target=_read, args=(process, log, on_line), daemon=True)
    reader.start()
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"not done after {timeout:g} s, ended") from None
    finally:
        _end(process)
        reader.join(10)
    if code != 0:
        lines = [line for line in re.split(r"[\r\n]+", log.read_text(errors="replace")) if line.strip()]
        # What a rank said is more to the point than the launcher's own traceback at the end.
        said = [_PREFIX.sub("", line) for line in lines if _PREFIX.match(line)] or lines
        raise LaunchError(f"exit code {code}, all output in {log}. It ends with:\n" + "\n".join(said[-15:]))


def _read(process: subprocess.Popen[bytes], log: Path, on_line: Callable[[str], None]) -> None:
    assert process.stdout is not None
    rest = ""
    with log.open("wb") as file:
        while chunk := os.read(process.stdout.fileno(), 4096):
            file.write(chunk)
            file.flush()
            *lines, rest = re.split(r"[\r\n]+", rest + _PREFIX.sub("", chunk.decode(errors="replace")))
            for line in filter(str.strip, lines):
                on_line(line.strip())


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and whatever it started; its children have process groups of their own."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    for child in family:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
