"""Bytes and time of every exchange on real ranks, and bytes by the formula up to 1024 ranks.

Writes docs/exchange.md and docs/exchange.png. Times are of this machine, where the ranks share cores and
memory: they show what the exchanges cost beside the wire, not what they gain on a network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from hvd_gradcomp import __version__, parse  # noqa: E402
from hvd_gradcomp.exchange import EXCHANGES, choose  # noqa: E402
from hvd_gradcomp.exchange.base import wire_bytes  # noqa: E402
from hvd_gradcomp.exchange.hierarchical import Hierarchical  # noqa: E402
from hvd_gradcomp.spec import TensorSpec  # noqa: E402

NUMEL = 1 << 20
TENSOR = TensorSpec("w", (NUMEL,))
ROWS = [("uniform(bits=8)", "gather"), ("uniform(bits=8)", "two_stage"), ("uniform(bits=4)", "gather"),
        ("uniform(bits=4)", "two_stage"), ("sign", "gather"), ("sign", "two_stage"),
        ("topk(ratio=0.001)", "gather"), ("topk(ratio=0.001)", "sparse_split"),
        ("topk(ratio=0.01) + uniform(bits=8)", "gather"), ("topk(ratio=0.01) + uniform(bits=8)", "sparse_split"),
        ("randomk(ratio=0.01)", "sum"), ("powersgd(rank=4)", "sum")]
DENSE = [("dense fp32", 4), ("dense fp16", 2)]
NOTES = """\
`auto` sums what may be summed, and else takes the one of the others with fewer bytes, if it saves at least 64 KiB (a
round more must pay) and, for `sparse_split`, a byte for every four elements (its work on a CPU must pay; on a GPU, ask
for it by name). With two ranks that is `gather`. Low-rank codecs use the tensor's shape and are not cut in
chunks unasked. `exchange=` takes a name, or a dict of name patterns.

With Horovod, all-to-all rows of neighboring tensors share messages of up to 1 MiB (PyTorch, and our TensorFlow
tape); under the stock tape, and for tensors with a schedule, each goes alone.

`two_stage` keeps what its second encoding loses at the chunk's owner (`owner_residual`, as many elements as the
tensor has, divided by N); `sparse_split` leaves what did not survive with the ranks that sent it. A region sends at
least one entry, so `sparse_split` costs more than its share where a tensor has fewer than N entries to send.

## Between hosts

`exchange="hierarchical"` adds float32 values inside each host, and compresses between hosts: every rank takes its
share of the host's mean, one in L, and exchanges it by `auto` with the ranks that have the same share on other hosts;
then the host's ranks give each other their shares. A payload of the whole tensor leaves a host once, not once for
each of its L ranks. L is the launcher's number of ranks on a host, or yours: `"hierarchical(local=4)"`. Ranks of a
host are neighbors, equally many on every host (another number is an error). With one host, or one rank on each, it is
`auto`.

It needs process sets, of every host and of every share. Either

```python
hvd.init(process_sets=gradcomp.host_process_sets())      # hvd_gradcomp.torch or hvd_gradcomp.tensorflow
```

or set `HOROVOD_DYNAMIC_PROCESS_SETS=1`: then they are made at the first step (of a Compression over all ranks; one
over a `process_set` needs them made before). Without both, an error says so. mpi4py splits its communicator by
itself.

A rank counts all that it handed to its host as sent, except what its own share of the host's mean lost: that stays in
its residual, L times. So the residual of a rank is zero outside its share, and *sum of outputs + mean of residuals =
sum of mean gradients* holds as everywhere. A share has no shape, and codecs that learn (`powersgd`, learned `vq`) are
refused, as is DGC. Between hosts, `two_stage` keeps what its second encoding loses in the residual, too.
`stats()` counts the bytes inside the host, too.

## Sums of levels

`exchange="sum"` also carries `uniform` (from 2 bits), `qsgd` and `ternary`, where it is asked for: as whole levels of
one step that all ranks share, packed into lanes of int32 words, which an ordinary all-reduce adds without carries. A
lane holds the sum of N ranks with its sign, `1 + ceil(log2(N L + 1))` bits for L levels. So it sends more bytes than
`two_stage`, the more the larger N is, for one round less and no second encoding. There is one step for the tensor,
whatever `block` is; with error feedback values are rounded to the nearest level, without it by chance where the codec
does. There is no native kernel for them yet: they take several passes over the tensor.

What the payloads of such sums, and of `fp16`, are scaled by comes from earlier steps: only the first step of a stage
asks all ranks for the largest magnitude, which is a round more. In the others this step's largest travels beside the
payload, for the next one. What outgrows the bound (`fp16`: 16 times) is clipped, stays in the residual, and is sent
when the next bound knows of it; a bound halves at most in a step. The bound is the state array `sum_bound`, the same
on every rank, saved and restored; a void step does not move it. Without error feedback every step asks, since what is
clipped would be lost."""
FORMULA = (2, 4, 8, 16, 64, 256, 1024)
SUMMED = [("uniform(bits=8)", "sum"), ("uniform(bits=4)", "sum"), ("ternary", "sum")]
LOCAL = 8
HOSTS = ["uniform(bits=4)", "sign", "topk(ratio=0.001)"]
MEASURED = "## On real ranks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="default: 2 4 8")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed steps of each row (default: 5)")
    parser.add_argument("--transport", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "exchange.md", metavar="FILE")
    parser.add_argument("--text", action="store_true", help="write the page anew up to what was measured")
    parser.add_argument("--measure", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # what the ranks run
    args = parser.parse_args()
    if args.measure:
        measure(args.steps, args.measure)
        return 0
    if args.text:
        new, old = page({}, args.transport, args.steps), args.into.read_text(encoding="utf-8")
        args.into.write_text(new[: new.index(MEASURED)] + old[old.index(MEASURED) :], encoding="utf-8")
        return 0
    from launch import horovodrun

    out = ROOT / "results" / "exchange"
    out.mkdir(parents=True, exist_ok=True)
    measured = {}
    for ranks in args.ranks:
        print(f"{ranks} ranks ...", flush=True)
        file = out / f"{ranks}.json"
        horovodrun(ranks, args.transport, Path(__file__), ["--measure", str(file), "--steps", str(args.steps)],
                   timeout=900, log=out / f"{ranks}.log", on_line=lambda line: None)
        measured[ranks] = json.loads(file.read_text())
    args.into.write_text(page(measured, args.transport, args.steps), encoding="utf-8")
    plot(args.into.with_suffix(".png"))
    print(f"written: {args.into}")
    return 0


def from_other_hosts(spec: str, exchange: str, ranks: int) -> float:
    """Bytes that a host of LOCAL ranks receives in a step, at least, from others."""
    codec = parse(spec)
    chosen = choose(codec, TENSOR, ranks, exchange)
    if isinstance(chosen, Hierarchical):
        return LOCAL * chosen.crossing(codec, TENSOR, ranks)
    if chosen.name == "sum":  # a ring enters a host once
        return chosen.received(codec, TENSOR, ranks)
    return LOCAL * chosen.received(codec, TENSOR, ranks) * (ranks - LOCAL) / (ranks - 1)


def formula(spec: str, exchange: str, ranks: int) -> float:
    """Bytes that one rank receives in a step."""
    return EXCHANGES[exchange].received(parse(spec), TENSOR, ranks)


# -- inside the ranks ---------------------------------------------------------------------------------------------


def measure(steps: int, file: Path) -> None:
    """Time every row, and take its bytes from the statistics."""
    import horovod.torch as hvd
    import torch

    import hvd_gradcomp.torch as gradcomp

    hvd.init()
    torch.set_num_threads(1)
    grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(hvd.rank()))
    rows = []
    for name, size in DENSE:
        wire = grad.to(torch.float16 if size == 2 else torch.float32)
        seconds = _seconds(lambda wire=wire: hvd.allreduce(wire, name="dense"), steps, hvd)
        rows.append({"spec": name, "exchange": "", "bytes": wire_bytes("sum", size * NUMEL, hvd.size()),
                     "seconds": seconds})
    for spec, exchange in ROWS:
        param = torch.nn.Parameter(torch.zeros(NUMEL))
        compression = gradcomp.Compression(spec, [("w", param)], exchange=exchange)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), named_parameters=[("w", param)],
                                             compression=compression)

        def reduce(param: Any = param, optimizer: Any = optimizer) -> None:
            param.grad = grad.clone()
            optimizer.synchronize()

        seconds = _seconds(reduce, steps, hvd)
        stats = compression.stats()
        rows.append({"spec": spec, "exchange": exchange, "bytes": stats["wire_bytes_received"] / stats["steps"],
                     "seconds": seconds})
    if hvd.rank() == 0:
        file.write_text(json.dumps(rows))


def _seconds(run: Any, steps: int, hvd: Any) -> float:
    run()
    times = []
    for _ in range(steps):
        hvd.barrier()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# -- the page -----------------------------------------------------------------------------------------------------


def page(measured: dict[int, list[dict[str, Any]]], transport: str, steps: int) -> str:
    """The Markdown page."""
    counts = list(measured)
    lines = [
        "# Exchanges: bytes and time", "",
        f"One tensor of {NUMEL:,} float32. `make exchange` makes this page. Very large ones: [large.md](large.md).", "",
        "| exchange | how | bytes received per rank, payload P |", "|---|---|---|",
        "| `sum` | all-reduce of payloads that may be added | 2 (N-1)/N P |",
        "| `gather` | all payloads to all ranks | (N-1) P |",
        "| `two_stage` | chunk by chunk to an owner, who adds, encodes again and gives it to all | 2 (N-1)/N P |",
        "| `sparse_split` | the same for the entries of `topk`: what is not among the largest sums stays where it was "
        "| 2 (N-1)/N P |",
        "| `hierarchical` | dense inside a host, one of the others between hosts | from other hosts: that of the "
        "other, of a tensor 1/L as long, H hosts for N |", "",
        NOTES, "",
        "## By the formula", "", "Kilobytes that one rank receives in a step.", "",
        "| codec | exchange | " + " | ".join(f"N={n}" for n in FORMULA) + " |",
        "|---|---|" + "---:|" * len(FORMULA)]
    for name, size in DENSE:
        cells = [f"{wire_bytes('sum', size * NUMEL, n) / 1000:,.0f}" for n in FORMULA]
        lines.append(f"| {name} | | " + " | ".join(cells) + " |")
    for spec, exchange in [*ROWS, *SUMMED]:
        cells = [f"{formula(spec, exchange, n) / 1000:,.1f}" for n in FORMULA]
        lines.append(f"| `{spec}` | `{exchange}` | " + " | ".join(cells) + " |")
    counted = FORMULA[-4:]
    lines += ["", "![Bytes received over the number of ranks](exchange.png)", "",
              f"Kilobytes that a host of {LOCAL} ranks receives from other hosts in a step: where ranks know nothing "
              f"of hosts, and with `hierarchical(local={LOCAL})`.", "",
              "| codec | exchange | " + " | ".join(f"N={n}" for n in counted) + " |",
              "|---|---|" + "---:|" * len(counted)]
    for spec in HOSTS:
        for exchange in ("auto", f"hierarchical(local={LOCAL})"):
            cells = [f"{from_other_hosts(spec, exchange, n) / 1000:,.1f}" for n in counted]
            lines.append(f"| `{spec}` | `{exchange}` | " + " | ".join(cells) + " |")
    lines += ["", MEASURED, "",
              f"Made with hvd_gradcomp {__version__}, Python {platform.python_version()}, {transport}, "
              f"{os.cpu_count()} cores for all ranks.", "",
              "Bytes are those of `stats()`, counted from the plan (`tests/contract` holds the plan to what a lockstep "
              "world moves); `+` is what tokens and step flag add to the formula. Time is the median of "
              f"{steps} steps, encoding and decoding included. All ranks share one machine, which other work kept busy "
              f"too (load {os.getloadavg()[2]:.0f}), and there is no wire to save: compare times within a column "
              "only.", "",
              "| codec | exchange | " + " | ".join(f"kB, N={n} | + | ms" for n in counts) + " |",
              "|---|---|" + "---:|---:|---:|" * len(counts)]
    for i, row in enumerate(measured[counts[0]] if counts else []):
        spec, exchange = row["spec"], row["exchange"]
        cells = []
        for n in counts:
            each = measured[n][i]
            more = "" if not exchange else f"{each['bytes'] - formula(spec, exchange, n):.0f} B"
            cells.append(f"{each['bytes'] / 1000:,.1f} | {more} | {1000 * each['seconds']:.0f}")
        lines.append(f"| {f'`{spec}`' if exchange else spec} | {exchange and f'`{exchange}`'} | "
                     + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def plot(file: Path) -> None:
    """Bytes over the number of ranks, by the formula."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    counts = [2**i for i in range(1, 11)]
    for (name, size), style in zip(DENSE, ("k:", "k-."), strict=True):
        axes.plot(counts, [wire_bytes("sum", size * NUMEL, n) for n in counts], style, label=name)
    for number, (spec, exchange) in enumerate(ROWS):
        style = "--" if exchange == "gather" or spec.startswith("power") else "-"
        axes.plot(counts, [formula(spec, exchange, n) for n in counts], style, color=f"C{number // 2}",
                  label=f"{spec}, {exchange}")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="bytes received per rank and step")
    axes.set_xticks(counts, [str(n) for n in counts])
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
