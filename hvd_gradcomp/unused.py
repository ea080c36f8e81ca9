"""A Compression that was given to something that never called it warns when the program ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable


def watch(what: str, was_used: Callable[[], bool], size: Callable[[], int]) -> None:
    """Print a warning at exit if ``was_used()`` is still False and there is more than one rank.

    ``was_used`` lives until then: it must hold what it asks only weakly.
    (Stock Horovod 0.28.1 wraps Keras 3 optimizers without ever reducing a gradient, and says nothing.)
    """
    atexit.register(_report, what, was_used, size)


def _report(what: str, was_used: Callable[[], bool], size: Callable[[], int]) -> None:
    if not was_used() and _ranks(size) > 1:
        print(f"hvd_gradcomp: warning: {what} was never called, so nothing was compressed. Gradients may not even have "
              "been reduced: check that it was passed as compression= to an optimizer or tape that reduces them",
              file=sys.stderr, flush=True)


def _ranks(size: Callable[[], int]) -> int:
    try:
        return size()
    except ValueError:  # Horovod was shut down already, or never started: ask the launcher's variables
        return int(os.environ.get("HOROVOD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))
