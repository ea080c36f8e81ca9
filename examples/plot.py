"""The picture of compare.py: test accuracy after each epoch, over the megabytes received until then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to a file, with or without a display
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

COLORS = ["#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31"]
MARKERS = "osD^vP*X"


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """One panel for each framework; with several seeds, the mean as a line and each seed as thin ones."""
    frameworks = list(dict.fromkeys(run["framework"] for run in runs))
    specs = list(dict.fromkeys(run["compression"] for run in runs))
    figure, axes = plt.subplots(1, len(frameworks), figsize=(5.4 * len(frameworks), 4.6), sharey=True, squeeze=False,
                                layout="constrained")
    for axis, framework in zip(axes[0], frameworks, strict=True):
        for number, spec in enumerate(specs):
            same = [run for run in runs if (run["framework"], run["compression"]) == (framework, spec)]
            if same:
                _curve(axis, same, COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)])
        axis.set_title(framework)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda megabytes, _: f"{megabytes:g}"))
        axis.set_xlabel("megabytes received by each rank (log scale)")
        axis.grid(alpha=0.25, which="both", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("test accuracy, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    # The climb from chance is the same story everywhere: the room belongs to where the curves end.
    final = [100 * run["accuracy"] for run in runs]
    axes[0][0].set_ylim(min(final) - 12, max(final) + 1)
    run = runs[0]
    figure.suptitle(f"MNIST, {run['ranks']} Horovod ranks, a point per epoch: further left is fewer bytes", fontsize=11)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _curve(axis: Any, runs: list[dict[str, Any]], color: str, marker: str) -> None:
    curves = [[(point["megabytes"], 100 * point["accuracy"]) for point in run["history"]] for run in runs]
    megabytes = [x for x, _ in curves[0]]
    mean = [sum(curve[i][1] for curve in curves) / len(curves) for i in range(len(megabytes))]
    if len(curves) > 1:
        for curve in curves:
            axis.plot(*zip(*curve, strict=True), color=color, linewidth=0.7, alpha=0.35)
    axis.plot(megabytes, mean, color=color, marker=marker, markersize=5, linewidth=1.8, label=runs[0]["compression"])
