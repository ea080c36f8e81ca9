"""Arguments of ``python -m hvd_gradcomp``, and the command they name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hvd_gradcomp.cli import bench, codecs
from hvd_gradcomp.errors import GradcompError
from hvd_gradcomp.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 for input that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m hvd_gradcomp",
                                     description="Gradient compression for an unmodified Horovod.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (codecs, bench):
        command.add_arguments(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (GradcompError, OSError) as error:
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return 2
    return 0
