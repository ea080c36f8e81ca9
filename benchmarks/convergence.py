"""Train examples/pytorch_mnist.py with every codec at its default and at an aggressive setting.

Two Horovod ranks, the same seeds as the uncompressed run; writes docs/convergence.md. Accuracy at the
default settings should stay within a point of uncompressed; the aggressive ones are reported as they are.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from hvd_gradcomp import __version__  # noqa: E402
from hvd_gradcomp.codecs.registry import CODECS  # noqa: E402

DEFAULT = [str(cls()) for cls in CODECS.values()]
AGGRESSIVE = ["uniform(bits=1)", "log(bits=3)", "qsgd(levels=1)", "sign(block=None)", "vq(dim=16, codewords=64)",
              "topk(ratio=0.001)", "topk(ratio=0.001) + uniform(bits=8)", "randomk(ratio=0.001)",
              "blocktopk(ratio=0.001)", "powersgd(rank=1)", "svd(rank=1)", "tt(rank=1)", "tr(rank=1)"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "convergence.md", metavar="FILE")
    args, passed_on = parser.parse_known_args()
    out = ROOT / "results" / "convergence"
    status = subprocess.run([
        sys.executable, str(ROOT / "examples" / "compare.py"), "--frameworks", "torch", "--out", str(out),
        "--plot", str(args.into.with_suffix(".png")), "--codecs", *DEFAULT, *AGGRESSIVE,
        "--seeds", *map(str, args.seeds), *passed_on], check=False).returncode
    runs = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    args.into.write_text(page(runs, args.seeds), encoding="utf-8")
    print(f"written: {args.into}")
    return status


def page(runs: list[dict[str, Any]], seeds: list[int]) -> str:
    """The Markdown page."""
    one = runs[0]
    lines = ["# Convergence on real data", "",
             f"MNIST (4,000 digits), the CNN of `examples/pytorch_mnist.py`, {one['ranks']} Horovod ranks, "
             f"{one['epochs']} epochs, seeds {', '.join(map(str, seeds))}. Accuracies are of 1,000 test digits, where "
             "one digit is 0.1 points; `change` is against the uncompressed run with the same seed.", "",
             f"Made by `python benchmarks/convergence.py --seeds {' '.join(map(str, seeds))}` with hvd_gradcomp "
             f"{__version__}, torch {torch.__version__}, Python "
             f"{platform.python_version()} on {platform.machine()}.", ""]
    for title, specs in (("Every codec at its default", DEFAULT), ("Aggressive settings", AGGRESSIVE)):
        lines += [f"## {title}", "", "| codec | ratio | accuracy % | mean change | worst change |",
                  "|---|---:|---|---:|---:|"]
        lines += [_row(spec, runs, seeds) for spec in specs]
        lines.append("")
    return "\n".join([*lines, "![Accuracy over bytes received](convergence.png)", ""])


def _row(spec: str, runs: list[dict[str, Any]], seeds: list[int]) -> str:
    found = {(run["compression"], run["seed"]): run for run in runs}
    mine = [found.get((spec, seed)) for seed in seeds]
    if None in mine:
        return f"| `{spec}` | | failed | | |"
    done = [run for run in mine if run is not None]
    changes = [100 * (run["accuracy"] - found["none", run["seed"]]["accuracy"]) for run in done]
    accuracies = " ".join(f"{100 * run['accuracy']:.1f}" for run in done)
    return (f"| `{spec}` | {done[0]['ratio']:.1f} | {accuracies} | {statistics.mean(changes):+.2f} | "
            f"{min(changes):+.1f} |")


if __name__ == "__main__":
    sys.exit(main())
