"""One very large gradient in pieces, on two real ranks: memory beyond gradient and residual, and time.

Writes docs/large.md. Every rank needs 8 bytes an element (gradient and residual), and what the page shows. ``--whole``
measures the same without pieces: run it with fewer elements.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from hvd_gradcomp import __version__  # noqa: E402

ROWS = [("topk(ratio=0.001)", "gather"), ("topk(ratio=0.001)", "sparse_split"), ("uniform(bits=8)", "gather"),
        ("uniform(bits=8)", "two_stage"), ("sign", "gather"), ("sign", "two_stage")]
NOTES = """\
PyTorch exchanges tensors of more than `large=` elements (67,108,864; an argument of `Compression`) in pieces of a 64th
of that, when backward is done and the step's verdict is known: three pieces are begun at a time, so that one is
decoded while the next is on the wire and the one after it is encoded. A piece's payload lives until the piece is
decoded, which goes into the gradient's own storage. The gradient must be float32 and contiguous; of any other, a
float32 copy is made.

* Pieces are multiples of 1,024 elements. Where a block (1,024 by default) divides that, `uniform`, `sign`, `log` and
  `bf16`, gathered, give bit for bit what they give of the whole tensor (`test_pieces_of_whole_blocks_are_the_whole`).
* `topk`, `randomk` and `blocktopk` keep their share of *each piece*: other entries than of the whole, as many. What
  draws by chance draws other numbers. `block=None` is one block for each piece.
* Under `two_stage` what the second encoding loses stays, N times, in the residual of the piece's owner; under `sum`
  each piece asks for its bound.
* Codecs that need the tensor's shape, or learn (low rank, learned codebooks), and DGC, exchange the whole.
* TensorFlow and mpi4py exchange the whole: a graph, and an array that is given, are not written in place."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=500_000_000, metavar="N", help="elements (default: 500,000,000)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--whole", action="store_true", help="without pieces")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "large.md", metavar="FILE")
    parser.add_argument("--row", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # what the ranks run
    args = parser.parse_args()
    if args.measure:
        measure(args.numel, args.whole, *ROWS[args.row], args.measure)
        return 0
    from launch import horovodrun

    out = ROOT / "results" / "large"
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(len(ROWS)):  # each in processes of its own, whose memory is not that of the rows before
        file = out / f"{'whole' if args.whole else 'pieces'}{i}.json"
        options = ["--numel", str(args.numel), "--row", str(i), "--measure", str(file)]
        horovodrun(args.ranks, "gloo", Path(__file__), options + (["--whole"] if args.whole else []), timeout=900,
                   log=file.with_suffix(".log"), on_line=lambda line: None)
        rows.append(json.loads(file.read_text()))
        print(rows[-1], flush=True)
    args.into.write_text(page(rows, args), encoding="utf-8")
    print(f"written: {args.into}")
    return 0


def measure(numel: int, whole: bool, spec: str, exchange: str, file: Path) -> None:
    """Two steps of a row: the second is timed, and memory is the highest of both."""
    import horovod.torch as hvd
    import torch

    import hvd_gradcomp.torch as gradcomp

    hvd.init()
    torch.set_num_threads(1)
    hvd.allreduce(torch.ones(1), name="begin")  # Horovod has its buffers
    base = _status("VmRSS")
    grad = torch.empty(numel).normal_(generator=torch.Generator().manual_seed(hvd.rank()))
    param = torch.nn.Parameter(torch.empty(numel))  # never read, so it takes no memory
    compression = gradcomp.Compression(spec, [("w", param)], exchange=exchange, **({"large": None} if whole else {}))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), named_parameters=[("w", param)],
                                         compression=compression)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    seconds = 0.0
    for _ in range(2):
        param.grad = grad
        hvd.barrier()
        began = time.perf_counter()
        optimizer.synchronize()
        seconds = time.perf_counter() - began
    extra = max(hvd.allgather_object(_status("VmHWM") - base - 8 * numel))
    if hvd.rank() == 0:
        file.write_text(json.dumps({"spec": spec, "exchange": exchange, "seconds": seconds, "extra": extra,
                                    "pieces": len(compression.plan.slots["w"].cuts)}))
    hvd.barrier()


def _status(name: str) -> int:
    """Bytes, as Linux tells of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def page(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The Markdown page."""
    lines = ["# Very large tensors", "", NOTES, "", "## Measured", "",
             f"`python benchmarks/large.py --numel {args.numel}{' --whole' if args.whole else ''}`: one gradient of "
             f"{args.numel:,} float32 ({4 * args.numel / 1e9:.1f} GB) and its residual on each of {args.ranks} ranks, "
             f"Gloo, {os.cpu_count()} cores for all; hvd_gradcomp {__version__}, Python {platform.python_version()}. "
             f"Memory is the peak of a process beyond gradient and residual. Other work kept the machine busy (load "
             f"{os.getloadavg()[2]:.0f}): times tell little.", "",
             "| codec | exchange | pieces | extra memory, MB | of the gradient | s, one step |",
             "|---|---|---:|---:|---:|---:|"]
    for row in rows:
        share = row["extra"] / (4 * args.numel)
        lines.append(f"| `{row['spec']}` | `{row['exchange']}` | {row['pieces'] or 1} | {row['extra'] / 1e6:,.0f} | "
                     f"{share:.1%} | {row['seconds']:.1f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
