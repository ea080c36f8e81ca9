"""Run both examples with several codecs on real Horovod ranks, and compare accuracy and bytes.

This is what ``make demo`` runs. Each run's results and output are kept in --out, the picture in --plot.
Options that are not listed here go to the examples, such as --epochs 4.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from launch import LaunchError, horovodrun
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
SCRIPTS = {"torch": "pytorch_mnist.py", "tensorflow": "tensorflow2_mnist.py"}
CODECS = ["none", "fp16", "uniform(bits=4)", "topk(ratio=0.01)"]
Run = dict[str, Any]
"""One run's JSON file: the fields of common.Result."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("-np", "--ranks", metavar="N", type=int, default=2, help="number of ranks (default: 2)")
    add("--transport", choices=["gloo", "mpi"], default="gloo", help="what horovodrun starts with (default: gloo)")
    add("--frameworks", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="default: both")
    add("--codecs", metavar="SPEC", nargs="+", default=CODECS, help=f"default: {' '.join(map(repr, CODECS))}")
    add("--seeds", metavar="N", type=int, nargs="+", default=[0], help="repeat everything for each seed (default: 0)")
    add("--timeout", metavar="S", type=float, default=300, help="limit for one run in seconds (default: 300)")
    add("--out", metavar="DIR", type=Path, default=HERE.parent / "results" / "demo",
        help="default: results/demo")
    add("--plot", metavar="FILE", type=Path, default=HERE.parent / "demo.png", help="default: demo.png")
    return result


def main() -> int:
    args, passed_on = parser().parse_known_args()
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 110)  # a log file has room
    todo = [(framework, spec, seed) for seed in args.seeds for framework in args.frameworks for spec in args.codecs]
    shutil.rmtree(args.out, ignore_errors=True)  # no run of an earlier call may slip into the table
    args.out.mkdir(parents=True)
    console.print(f"{len(todo)} runs on {args.ranks} Horovod ranks over {args.transport}, usually 10 to 30 seconds "
                  f"each. Their output is kept in {shown(args.out)}", highlight=False)

    runs: list[Run] = []
    columns = (MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn(),
               TextColumn("{task.fields[line]}", markup=False))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(todo), line="")
        for framework, spec, seed in todo:
            name = f"{framework} {spec}" + (f" seed {seed}" if len(args.seeds) > 1 else "")
            stem = args.out.resolve() / "_".join(re.findall(r"[\w.]+", name))
            file = Path(f"{stem}.json")
            arguments = ["--compression", spec, "--seed", str(seed), "--json", str(file), *passed_on]

            def show(line: str, name: str = name) -> None:
                progress.update(bar, line=f"{name}: {line}")

            show("starting")
            try:
                horovodrun(args.ranks, args.transport, HERE / SCRIPTS[framework], arguments, timeout=args.timeout,
                           log=Path(f"{stem}.log"), on_line=show)
                run = json.loads(file.read_text())
                console.print(f"  {name}: accuracy {100 * run['accuracy']:.1f} %, "
                              f"{run['wire_bytes_per_step']:,.0f} bytes a step", highlight=False)
                runs.append(run)
            except (LaunchError, OSError) as error:
                console.print(f"  {name}: FAILED, {error}", style="red", markup=False)
            progress.advance(bar)

    if runs:
        console.print(table(runs))
        console.print("accuracy in %, vs none in points, kB for each rank, ratio to dense float32", style="dim")
        if (worst := worst_change(runs)) is not None:
            console.print(f"Against the uncompressed run with the same seed, accuracy changed by {worst:+.1f} points "
                          "in the worst case.", highlight=False)
        from plot import draw

        draw(runs, args.plot)
        console.print(f"Accuracy over bytes received: {shown(args.plot)}", highlight=False)
    if len(runs) < len(todo):
        console.print(f"{len(todo) - len(runs)} of {len(todo)} runs failed", style="red")
    return 0 if len(runs) == len(todo) else 1


def shown(path: Path) -> str:
    """The path as short as it gets."""
    return os.path.relpath(path)


def change_of(runs: list[Run], run: Run) -> float | None:
    """Points of accuracy that a run has more than its uncompressed twin (None without one)."""
    for twin in runs:
        if (twin["framework"], twin["seed"], twin["compression"]) == (run["framework"], run["seed"], "none"):
            return 100 * (run["accuracy"] - twin["accuracy"])
    return None


def worst_change(runs: list[Run]) -> float | None:
    """The lowest of all changes of compressed runs."""
    found = [change for run in runs if run["compression"] != "none" and (change := change_of(runs, run)) is not None]
    return min(found, default=None)


def table(runs: list[Run]) -> Table:
    """One row for each framework and codec; several seeds stand side by side in a cell.

    Accuracy (%) and loss are of the test digits, ``vs none`` is in points, kB are what a rank receives, ``ratio``
    is how many times fewer they are than those of dense float32, the time is that of training alone."""
    seeds = sorted({run["seed"] for run in runs})
    result = Table(title=f"MNIST, {runs[0]['ranks']} ranks, {runs[0]['epochs']} epochs, "
                         f"seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}",
                   box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("framework", "compression"):
        result.add_column(heading, no_wrap=True)
    for heading in ("accuracy", "vs none"):  # several seeds may need several lines
        result.add_column(heading, justify="right", min_width=len(heading))
    for heading in ("loss", "kB/step", "ratio", "s"):
        result.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for key in dict.fromkeys((run["framework"], run["compression"]) for run in runs):
        same = {run["seed"]: run for run in runs if (run["framework"], run["compression"]) == key}
        if previous not in (None, key[0]):
            result.add_section()
        previous = key[0]
        one = next(iter(same.values()))
        mean = {field: sum(run[field] for run in same.values()) / len(same) for field in ("loss", "seconds")}
        result.add_row(*key,
                       " ".join(f"{100 * same[seed]['accuracy']:.1f}" if seed in same else "failed" for seed in seeds),
                       " ".join(_points(change_of(runs, same[seed]) if seed in same else None) for seed in seeds),
                       f"{mean['loss']:.3f}", f"{one['wire_bytes_per_step'] / 1000:.1f}", f"{one['ratio']:.1f}",
                       f"{mean['seconds']:.1f}")
    return result


def _points(change: float | None) -> str:
    return "-" if change is None else f"{change:+.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
