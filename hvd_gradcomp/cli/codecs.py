"""``codecs``: what there is to choose from."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hvd_gradcomp import kernels, native, payload
from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.codecs.powersgd import PowerSGD
from hvd_gradcomp.codecs.registry import CODECS
from hvd_gradcomp.spec import TensorSpec

_SHAPE = (1024, 1024)


def add_arguments(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "codecs", help="list all codecs", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="List all codecs with their default arguments.",
        epilog="A spec is a codec with its arguments, joined to others by '+':\n"
               "  topk(ratio=0.001) + uniform(bits=8)")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.set_defaults(run=run)


def rows() -> list[dict[str, Any]]:
    """One entry per codec at its defaults; bytes per element are those of a 1024 x 1024 tensor."""
    spec = TensorSpec("example", _SHAPE)
    out = []
    for name, cls in CODECS.items():
        codec = cls()
        arguments = {key: value for key, value in codec.config().items() if key != "codec"}
        out.append({"codec": name, "spec": str(codec), "family": codec.family, "arguments": arguments,
                    "bytes_per_element": payload.nbytes(codec.layout(spec)) / spec.numel,
                    "summable": codec.summable, "kernel": has_kernel(codec), "use": codec.use})
    return out


def has_kernel(codec: Codec) -> bool:
    """Whether a native kernel does its work here, on the CPU."""
    return native.find(codec, TensorSpec("example", _SHAPE)) is not None or (
        isinstance(codec, PowerSGD) and native.available())


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    entries = rows()
    if options.json:
        print(json.dumps(entries, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Codecs at their defaults; bytes per element on a 1024 x 1024 tensor (float32: 4)",
                  caption=f"native kernels: {kernels.status()}")
    for column in ("codec", "family", "bytes", "summed", "kernel", "what it is good for"):
        table.add_column(column, justify="right" if column == "bytes" else "left", no_wrap=True)
    for entry in entries:
        table.add_row(entry["spec"], entry["family"], f"{entry['bytes_per_element']:.4f}",
                      "yes" if entry["summable"] else "no", "yes" if entry["kernel"] else "no", entry["use"])
    console = Console()
    console.width = max(console.width, 140)  # what is piped into a file has room
    console.print(table)
