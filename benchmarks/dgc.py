"""Train with Deep Gradient Compression and with dense momentum SGD, with the same seeds, and write docs/dgc.md.

A network of a million parameters on Fashion-MNIST (examples/pytorch_dgc.py) and a language model
(examples/pytorch_language_model.py) on Horovod ranks: dense, DGC at ratio 0.001 with a warm-up, and, for the
first seeds, plain top-k with error feedback at the same ratio. What the page says above the line of MARK is
written by hand and stays. Finished runs in --out are kept, so a call that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")  # draws to a file, with or without a display
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from launch import horovodrun  # noqa: E402
from plot import COLORS, MARKERS  # noqa: E402

from hvd_gradcomp import __version__  # noqa: E402

MARK = "<!-- Below: written by benchmarks/dgc.py -->"
# Two-sided 95 % points of Student's t, by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

DENSE, DGC, TOPK = "dense momentum SGD", "DGC", "top-k, error feedback"
METHODS: dict[str, list[str]] = {
    DENSE: ["--ratio", "1"],
    DGC: ["--ratio", "0.001", "--value-codec", "uniform(bits=8)"],
    TOPK: ["--compression", "topk(ratio=0.001) + uniform(bits=8)"],
}
Run = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One network: its example, its options, and how its result is compared."""

    title: str
    script: str
    options: tuple[str, ...]
    measure: str
    """Column of the table."""
    goal: str
    """What DGC is to reach, for the page."""

    def value(self, run: Run) -> float:
        """Accuracy in per cent, or perplexity per byte."""
        return 100 * run["accuracy"] if self.measure == "accuracy %" else math.exp(run["loss"])

    def change(self, run: Run, dense: Run) -> float:
        """Points of accuracy, or per cent of perplexity, against the dense run."""
        one, other = self.value(run), self.value(dense)
        return one - other if self.measure == "accuracy %" else 100 * (one / other - 1)


def tasks(args: argparse.Namespace) -> list[Task]:
    """Both tasks as the options size them."""
    images = [] if args.data is None else ["--data", str(args.data)]
    return [
        Task("CNN, 1,024,000 parameters", "pytorch_dgc.py",
             ("--batch-size", "16", "--epochs", str(args.epochs[0]), "--warmup-epochs", str(args.warmup[0]), *images),
             "accuracy %", "within 0.3 points of dense"),
        Task("Language model, 1,333,000 parameters", "pytorch_language_model.py",
             ("--batch-size", "4", "--epochs", str(args.epochs[1]), "--warmup-epochs", str(args.warmup[1]),
              "--steps", str(args.steps)), "perplexity", "within 1 % of dense")]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--seeds", metavar="N", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="default: 0 1 2 3 4")
    add("--topk-seeds", metavar="N", type=int, default=1,
        help="of so many of them also top-k with error feedback, to compare (default: 1)")
    add("-np", "--ranks", metavar="N", type=int, default=2, help="default: 2")
    add("--transport", choices=["gloo", "mpi"], default="mpi",
        help="default: mpi, whose shared memory is faster on one machine")
    add("--epochs", metavar=("CNN", "LM"), type=int, nargs=2, default=[6, 8], help="default: 6 8")
    add("--warmup", metavar=("CNN", "LM"), type=float, nargs=2, default=[1.5, 2.0],
        help="epochs of warm-up among them (default: 1.5 2)")
    add("--steps", metavar="N", type=int, default=600, help="steps per epoch of the language model (default: 600)")
    add("--only", choices=["cnn", "lm"], help="one of the networks")
    add("--data", metavar="DIR", type=Path, help="folder of Fashion-MNIST (default: Debian's, else MNIST)")
    add("--timeout", metavar="S", type=float, default=3600, help="limit for one run in seconds (default: 3600)")
    add("--note", metavar="TEXT", default="", help="a sentence about this measurement, for the page")
    add("--out", metavar="DIR", type=Path, default=ROOT / "results" / "dgc", help="default: results/dgc")
    add("--into", metavar="FILE", type=Path, default=ROOT / "docs" / "dgc.md", help="default: docs/dgc.md")
    return result


def main() -> None:
    args = parser().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [task for task, name in zip(tasks(args), ("cnn", "lm"), strict=True) if args.only in (None, name)]
    found = {(task.script, method, seed): run(args, task, method, seed)
             for seed in args.seeds for task in chosen for method in METHODS if seed in _seeds(args, method)}
    text = args.into.read_text(encoding="utf-8") if args.into.exists() else "# Deep Gradient Compression\n\n"
    text = text.partition(MARK)[0] + MARK + "\n\n" + page(args, chosen, found)
    args.into.write_text(text, encoding="utf-8")
    draw(args, chosen, found, args.into.with_suffix(".png"))
    print(f"written: {args.into}")


def _seeds(args: argparse.Namespace, method: str) -> list[int]:
    """Those that a method is run with."""
    return list(args.seeds[:args.topk_seeds] if method == TOPK else args.seeds)


def run(args: argparse.Namespace, task: Task, method: str, seed: int) -> Run:
    """One training's JSON, from an earlier call if it had the same options."""
    options = [*task.options, *METHODS[method], "--seed", str(seed)]
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{task.script} {' '.join(options)} {args.ranks} {args.transport}")
    file = args.out / f"{name}.json"
    if not file.exists():
        print(f"{task.title}, {method}, seed {seed}", flush=True)
        horovodrun(args.ranks, args.transport, ROOT / "examples" / task.script, [*options, "--json", str(file)],
                   timeout=args.timeout, log=file.with_suffix(".log"), on_line=lambda line: None)
        result = json.loads(file.read_text())
        print(f"  {task.measure} {task.value(result):.3f}, {result['seconds']:.0f} s", flush=True)
    return json.loads(file.read_text())


def interval(changes: Sequence[float]) -> str:
    """Mean and the half width of its 95 % interval over paired seeds."""
    if len(changes) == 1:
        return f"{changes[0]:+.2f} (one seed)"
    half = T95[len(changes) - 1] * statistics.stdev(changes) / math.sqrt(len(changes))
    return f"{statistics.mean(changes):+.2f} ± {half:.2f}"


def page(args: argparse.Namespace, chosen: Sequence[Task], found: dict[tuple[str, str, int], Run]) -> str:
    """The measured half of the page."""
    seeds = ", ".join(map(str, args.seeds))
    lines = ["## Measured", "",
             f"{args.ranks} Horovod ranks over {args.transport}, seed {seeds}; `change` is against the dense run with "
             "the same seed, mean and 95 % interval over the seeds. "
             + ("Top-k with error feedback has no warm-up. " if args.topk_seeds else "")
             + f"Made by `benchmarks/dgc.py` with hvd_gradcomp {__version__}, torch {torch.__version__}, Python "
             f"{platform.python_version()} on {platform.machine()}."
             + (f" {args.note}" if args.note else ""), ""]
    for task in chosen:
        one = found[task.script, DGC, args.seeds[0]]
        data = one["more"].get("data", "Python's standard library, in bytes")
        warmup = task.options[task.options.index("--warmup-epochs") + 1]
        unit = "points" if task.measure == "accuracy %" else "%"
        lines += [f"**{task.title}**, {data}, {one['epochs']} epochs of {one['steps'] // one['epochs']} steps, "
                  f"{float(warmup):g} of them warm-up; {one['batch_size']} samples per rank and step, momentum 0.9, "
                  f"learning rate {one['lr']:g} falling in a line to 0; the goal is {task.goal}.", "",
                  f"| method | {task.measure}, by seed | change, {unit} | fewer bytes: compressed tensors at the end | "
                  "whole run |", "|---|---|---:|---:|---:|"]
        for method in METHODS:
            runs = [found[task.script, method, seed] for seed in _seeds(args, method)]
            if not runs:
                continue
            dense = [found[task.script, DENSE, seed] for seed in _seeds(args, method)]
            changes = [task.change(one, other) for one, other in zip(runs, dense, strict=True)]
            values = " ".join(f"{task.value(each):.2f}" for each in runs)
            change = "" if method == DENSE else interval(changes)
            lines.append(f"| {method} | {values} | {change} | {runs[0]['sent_ratio']:,.0f} | {runs[0]['ratio']:.1f} |")
        lines.append("")
    return "\n".join([*lines, f"![Test results over epochs and over bytes]({args.into.stem}.png)", ""])


def draw(args: argparse.Namespace, chosen: Sequence[Task], found: dict[tuple[str, str, int], Run], file: Path) -> None:
    """Curves over epochs and over megabytes, the mean over the seeds."""
    figure, axes = plt.subplots(len(chosen), 2, figsize=(10, 4 * len(chosen)), squeeze=False, sharey="row",
                                layout="constrained")
    for row, task in zip(axes, chosen, strict=True):
        for number, method in enumerate(METHODS):
            runs = [found[task.script, method, seed]["history"] for seed in _seeds(args, method)]
            if not runs:
                continue
            values = [statistics.mean(task.value(point) for point in points) for points in zip(*runs, strict=True)]
            style = {"color": COLORS[number], "marker": MARKERS[number], "markersize": 4, "label": method}
            row[0].plot(range(1, len(values) + 1), values, **style)
            row[1].plot([point["megabytes"] for point in runs[0]], values, **style)
        row[0].set(xlabel="epoch", ylabel=task.measure, title=task.title)
        row[1].set(xlabel="megabytes received by each rank (log scale)", xscale="log")
        for axis in row:
            axis.grid(alpha=0.25, which="both", linewidth=0.6)
    axes[0][0].legend(frameon=False)
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
