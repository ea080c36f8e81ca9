"""The C++ kernels, built by ``setup.py`` once for each kind of processor, and which of them is in use.

``HVD_GRADCOMP_KERNELS=auto`` (the default) takes the fastest build that this processor runs and goes
without where there is none; ``require`` raises KernelError then; ``off`` uses none.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hvd_gradcomp.errors import KernelError, UsageError

MODES = ("auto", "require", "off")
BUILDS = ("avx512", "avx2", "portable")  # the fastest first


@cache
def load() -> tuple[Any, str]:
    """``(module or None, what is in use and why)``.

    Raises:
        UsageError: ``HVD_GRADCOMP_KERNELS`` is something else.
        KernelError: kernels are required and there are none.
    """
    mode = os.environ.get("HVD_GRADCOMP_KERNELS", "auto")
    if mode not in MODES:
        raise UsageError(f"HVD_GRADCOMP_KERNELS={mode!r}: it must be one of {', '.join(MODES)}")
    if mode == "off":
        return None, "off (HVD_GRADCOMP_KERNELS=off)"
    try:
        portable = import_module(f"{__name__}.portable")
        best = portable.supported()
        for name in BUILDS[BUILDS.index(best):-1]:
            if find_spec(f"{__name__}.{name}") is not None:
                return import_module(f"{__name__}.{name}"), name
        return portable, "portable"
    except ImportError as error:
        if mode == "require":
            raise KernelError(f"HVD_GRADCOMP_KERNELS=require, but the kernels cannot be loaded: {error}. Install a "
                              "C++17 compiler and then hvd-gradcomp again (pip install --force-reinstall "
                              "--no-deps), and read the build's output with -v") from error
        return None, f"none ({error})"


def status() -> str:
    """What is in use: ``avx512``, ``avx2``, ``portable``, or why none is."""
    return load()[1]


@cache
def _default_threads() -> int:
    text = os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]
    return max(1, int(text)) if text.isdigit() else 1


_threads: int | None = None


def set_threads(threads: int | None) -> None:
    """How many threads large tensors are worked on with; None: ``OMP_NUM_THREADS``, or 1."""
    global _threads
    _threads = threads


def threads() -> int:
    """How many threads large tensors are worked on with."""
    return _threads or _default_threads()
