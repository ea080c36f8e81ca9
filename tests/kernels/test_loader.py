"""HVD_GRADCOMP_KERNELS, and what is said about it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(code: str, mode: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "HVD_GRADCOMP_KERNELS": mode}, timeout=60,
                          capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


STATUS = "from hvd_gradcomp import kernels; print(kernels.status())"
BROKEN = "import sys; sys.modules['hvd_gradcomp.kernels.portable'] = None; "


def test_there_are_kernels_here() -> None:
    assert run(STATUS, "require").strip() in ("avx512", "avx2", "portable")


def test_off() -> None:
    assert run(STATUS, "off").strip() == "off (HVD_GRADCOMP_KERNELS=off)"


def test_without_kernels_it_works_and_says_so() -> None:
    assert run(BROKEN + STATUS, "auto").startswith("none (")


def test_required_kernels_that_are_missing_are_an_error_with_its_cause() -> None:
    out = run(BROKEN + STATUS, "require")
    assert "KernelError: HVD_GRADCOMP_KERNELS=require, but the kernels cannot be loaded" in out and "compiler" in out


def test_another_word_is_refused() -> None:
    assert "it must be one of auto, require, off" in run(STATUS, "on")


@pytest.mark.parametrize("build", ["portable", "avx2"])
def test_the_builds_for_other_processors_give_the_same_bytes(build: str) -> None:
    code = """
import importlib, sys
import numpy as np
from hvd_gradcomp import kernels
fast = kernels.load()[0]
other = importlib.import_module("hvd_gradcomp.kernels." + sys.argv[1])
n = 5000
x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
def parts(): return [np.zeros(5, np.float32), np.zeros(5, np.float32), np.zeros(n, np.uint8)]
for stochastic in (False, True):
    a, b = parts(), parts()
    for module, out in ((fast, a), (other, b)):
        module.Uniform(n, 1024, *out, 8, stochastic, 1, 2).encode(x, x, 1.0, None, 1)
    assert all((p == q).all() for p, q in zip(a, b))
rows = [np.zeros(50 * 4, np.float32) for _ in range(2)]
for module, out in ((fast, rows[0]), (other, rows[1])):
    module.rows_times(x, None, 1.0, None, 50, 100, x[:400].copy(), 4, out, 1)
assert (rows[0] == rows[1]).all()
print("same")
"""
    out = subprocess.run([sys.executable, "-c", code, build], capture_output=True, text=True, timeout=60, check=False)
    if "No module named" in out.stderr and build != "portable":
        pytest.skip(f"no {build} build on this processor's architecture")
    assert out.stdout.strip() == "same", out.stderr
