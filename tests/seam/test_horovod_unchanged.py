"""Nothing of Horovod is patched, copied or replaced: every installed file is what the wheel brought."""

import base64
import hashlib
import subprocess
import sys
from importlib.metadata import distribution

import pytest


def _digest(path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def test_files_are_as_installed() -> None:
    files = [f for f in distribution("horovod").files or [] if f.hash is not None]
    assert len(files) > 100, "the wheel's record is missing"
    changed = [str(f) for f in files if f.hash and _digest(f.locate()) != f.hash.value]
    assert not changed


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_importing_an_adapter_replaces_nothing_in_memory(framework: str) -> None:
    """Every function and class of Horovod's module is the same object before and after."""
    code = f"""
import importlib
hvd = importlib.import_module("horovod.{framework}")
optimizer = importlib.import_module("horovod.torch.optimizer") if "{framework}" == "torch" else hvd
before = [dict(vars(hvd)), dict(vars(optimizer))]
methods = {{k: dict(vars(v)) for k, v in vars(optimizer).items() if isinstance(v, type)}}
importlib.import_module("hvd_gradcomp.{framework}")
for was, module in zip(before, (hvd, optimizer)):
    assert all(vars(module)[k] is v for k, v in was.items()), module
for k, was in methods.items():
    assert dict(vars(vars(optimizer)[k])) == was, k
print("unchanged", len(before[0]), len(methods))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("unchanged") and int(run.stdout.split()[1]) > 50
