"""From the laboratory's JSON: docs/results.md, its pictures, and the headline table in README.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases

Row = dict[str, Any]
TRANSPORTS = {"mpi": "OpenMPI over TCP", "gloo": "Gloo"}
ORIGIN = ("made", "quick", "minutes", "processor")
"""What the JSON says of where a half of it, kept by ``--only``, comes from."""
BEGIN, END = "<!-- results: written by `make lab` -->", "<!-- end of results -->"


def write(measured: Row, source: Path, root: Path) -> Iterator[Path]:
    """Write all of it; gives the files."""
    folder = source.parent
    name = source.stem
    speeds = _speeds(measured)
    for kind, draw in (("exchange", _draw_exchange), ("training", _draw_training)):
        if measured[kind]:
            draw(measured, speeds, folder / f"{name}-{kind}.png")
            yield folder / f"{name}-{kind}.png"
    target = folder / f"{name}.md"
    target.write_text(_page(measured, speeds, name), encoding="utf-8")
    yield target
    readme = root / "README.md"
    if source == root / "docs" / "results.json":
        text = readme.read_text(encoding="utf-8")
        assert BEGIN in text and END in text, "README.md has lost the place of its table"
        before, _, rest = text.partition(BEGIN)
        said = ("Times of a whole exchange, encoding and decoding included, and how many times faster than Horovod "
                f"alone; [docs/{target.name}](docs/{target.name}) has the rest.")
        readme.write_text("\n".join([before + BEGIN, _headline(measured, speeds), said, END + rest.partition(END)[2]]),
                          encoding="utf-8")
        yield readme


# -- looking things up ------------------------------------------------------------------------------------------------


def _speeds(measured: Row) -> list[int]:
    return sorted({row["mbit"] for row in measured["exchange"] if row["mbit"]})


def _rows(measured: Row, **facts: Any) -> list[Row]:
    return [row for row in measured["exchange"] if all(row[key] == value for key, value in facts.items())]


def _find(rows: list[Row], codec: str, exchange: str, **facts: Any) -> Row | None:
    facts |= {"codec": codec, "exchange": exchange}
    return next((row for row in rows if all(row[key] == value for key, value in facts.items())), None)


def _kinds(rows: list[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["codec"], row["exchange"]) for row in rows))


def _called(codec: str, exchange: str) -> str:
    if codec in cases.DENSE:
        return f"{codec}, stock Horovod"
    return f"`{codec}`" + ("" if exchange == "auto" else f", `{exchange}`")


def _rate(mbit: int) -> str:
    return f"{mbit // 1000} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.{1 if seconds < 0.1 else 0}f}"


def _times(dense: Row | None, row: Row | None) -> str:
    if dense is None or row is None:
        return ""
    ratio = dense["seconds"] / row["seconds"]
    return f"{ratio:,.{1 if ratio >= 0.95 else 2}f} x"


def _table(head: list[str], body: list[list[str]], left: int = 1) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * left + "---:|" * (len(head) - left),
            *("| " + " | ".join(line) + " |" for line in body), ""]


# -- the parts --------------------------------------------------------------------------------------------------------


def _headline(measured: Row, speeds: list[int]) -> str:
    rows = _rows(measured, where="network", ranks=2, model="40 MB")
    body = []
    for codec, exchange in _kinds(rows):
        line = [_called(codec, exchange)]
        for speed in speeds:
            row, dense = (_find(rows, *kind, mbit=speed) for kind in ((codec, exchange), (cases.FP32, "")))
            line.append(f"{_ms(row['seconds'])} ms, {_times(dense, row)}" if row else "")
        body.append(line)
    return "\n".join(_table(["codec, 40 MB of gradients, 2 hosts", *map(_rate, speeds)], body))


def _targets(measured: Row, speeds: list[int]) -> list[str]:
    rows = _rows(measured, where="network", ranks=2, model="40 MB")
    body = []
    for codec, goals in cases.TARGETS.items():
        line = [f"`{codec}`"]
        for speed, goal in zip(cases.SPEEDS, goals, strict=True):
            row, dense = _find(rows, codec, "auto", mbit=speed), _find(rows, cases.FP32, "", mbit=speed)
            if row and dense:
                ratio = dense["seconds"] / row["seconds"]
                line.append(f"{ratio:,.1f} of {goal:g} {'reached' if ratio >= goal else '**missed**'}")
            else:
                line.append("")
        body.append(line)
    slower = [f"`{codec}` at {_rate(row['mbit'])}" for codec in cases.HEADLINE for row in rows
              if row["codec"] == codec and (half := _find(rows, cases.FP16, "", mbit=row["mbit"]))
              and row["seconds"] > half["seconds"]]
    return ["How many times faster than dense float32 of stock Horovod, of the times that this project wants (2 hosts, "
            "40 MB):", "", *_table(["codec", *map(_rate, cases.SPEEDS)], body),
            "Slower than stock fp16: " + (", ".join(slower) if slower else "none of them at any speed") + ".", ""]


def _exchanges(measured: Row, hosts: int, model: str, speeds: list[int]) -> list[str]:
    rows = _rows(measured, where="network", ranks=hosts, model=model)
    if not rows:
        return []
    some = rows[0]
    lines = [f"### {hosts} hosts, {model}", "", f"{some['numbers']:,} numbers in {some['tensors']} tensors.", ""]
    body = []
    for codec, exchange in _kinds(rows):
        line = [_called(codec, exchange)]
        for speed in speeds:
            row, dense = (_find(rows, *kind, mbit=speed) for kind in ((codec, exchange), (cases.FP32, "")))
            if row is None:
                line += [""] * 3
                continue
            mark = "*" if row["first_step_only"] else ""
            parts = " + ".join(_ms(row[name]) for name in ("encode", "wait", "decode"))
            line += [f"{_ms(row['seconds'])}{mark}", _times(dense, row), parts]
        one = next(row for row in rows if (row["codec"], row["exchange"]) == (codec, exchange))
        body.append([*line, f"{one['expected'] / 1000:,.0f}", f"{one['counted_rx'] / 1000:,.0f}"])
    head = ["codec"]
    for speed in speeds:
        head += [f"{_rate(speed)}, ms", "", "encode + wait + decode"]
    lines += _table([*head, "kB expected", "kB counted"], body)
    if any(row["first_step_only"] for row in rows):
        lines += ["\\* one step, the first, since a step takes longer than 15 seconds.", ""]
    return lines


def _not_paying(measured: Row) -> list[str]:
    memory: Row = {"where": "shared memory"}
    network: list[Row] = [{"where": "network", "mbit": speed} for speed in _speeds(measured)]
    lines = ["Two ranks on one machine, 40 MB, over the loopback interface and through shared memory:", "",
             *_compared(measured, "40 MB", [{"where": "loopback"}, memory], ["TCP over loopback", "shared memory"]),
             "A tiny model, 10 tensors of 1,000 numbers, all compressed (`min_size=0`; without it they are left to "
             "Horovod):", "",
             *_compared(measured, "40 kB", [memory, *network], ["shared memory", *map(_rate, _speeds(measured))])]
    alone = _rows(measured, where="one rank")
    if alone:
        most = max(row["seconds"] for row in alone)
        lines += [f"One rank: Horovod exchanges and compresses nothing, with any codec (at most {_ms(most)} ms).", ""]
    return lines


def _compared(measured: Row, model: str, places: list[Row], titles: list[str]) -> list[str]:
    rows = _rows(measured, model=model, ranks=2)
    body = []
    for codec, exchange in _kinds(rows):
        line = [_called(codec, exchange)]
        for place in places:
            row, dense = _find(rows, codec, exchange, **place), _find(rows, cases.FP32, "", **place)
            line.append(f"{_ms(row['seconds'])} ms, {_times(dense, row)}" if row else "")
        body.append(line)
    return _table(["codec", *titles], body)


def _time_to_target(measured: Row, row: Row) -> tuple[float, bool] | None:
    """Seconds, and whether they are computed from fewer steps."""
    if row["reached"]:
        return row["seconds"], False
    # The steps to the target do not depend on the network's speed.
    for twin in measured["training"]:
        if twin["reached"] and all(twin[key] == row[key] for key in ("framework", "codec", "ranks")):
            return (twin["steps"] - 1) * row["step_seconds"], True
    return None


def _training(measured: Row, speeds: list[int]) -> list[str]:
    if not measured["training"]:
        return []
    target, count = measured["training"][0]["target"], measured["training"][0]["ranks"]
    lines = ["## Training to a target accuracy", "",
             f"A perceptron of 1.9 million parameters (7.5 MB of gradients) on 4,000 MNIST digits to "
             f"{100 * target:.0f} % on the 1,000 others, {count} hosts, the same seed everywhere. Steps do not "
             "depend on the network; the time is that of the steps, without evaluation, start and the first step, "
             "which traces.", ""]
    for framework in dict.fromkeys(row["framework"] for row in measured["training"]):
        rows = [row for row in measured["training"] if row["framework"] == framework]
        body = []
        for codec in dict.fromkeys(row["codec"] for row in rows):
            mine = [row for row in rows if row["codec"] == codec]
            steps = next((str(row["steps"]) for row in mine if row["reached"]), "not reached")
            line = [_called(codec, "auto"), steps]
            for speed in speeds:
                row = next((row for row in mine if row["mbit"] == speed), None)
                if row is None:
                    line += ["", ""]
                    continue
                time = _time_to_target(measured, row)
                line += [_ms(row["step_seconds"]), f"{time[0]:.1f}{'*' if time[1] else ''}" if time else "-"]
            body.append([*line, f"{mine[0]['counted_rx'] / 1000:,.0f}"])
        head = ["codec", "steps"]
        for speed in speeds:
            head += [f"{_rate(speed)}: ms per step", "s to target"]
        lines += [f"### {'PyTorch' if framework == 'torch' else 'TensorFlow'}", "",
                  *_table([*head, "kB per step, counted"], body)]
    return [*lines, "\\* computed: the measured time of a step, times the steps it took on a faster network.", "",
            "![Time to accuracy](results-training.png)", ""]


def _command(quick: bool) -> str:
    return "python benchmarks/lab" + (" --quick" if quick else "")


def _page(measured: Row, speeds: list[int], name: str) -> str:
    models = list(dict.fromkeys(row["model"] for row in measured["exchange"]
                                if row["where"] == "network" and row["model"] in cases.MODELS))
    hosts = sorted({row["ranks"] for row in measured["exchange"] if row["where"] == "network"})
    command = _command(measured["quick"])
    if measured["transport"] != "mpi":
        command += f" --transport {measured['transport']}"
    if measured["env"]:
        command += " --env " + " ".join(measured["env"])
    kept = ""
    if "kept" in measured:
        part = measured["kept"]
        command += f" --only {'training' if part['part'] == 'exchange' else 'exchange'}"
        kept = (f" The {part['part']} part was made before, by `{_command(part['quick'])}` in {part['minutes']:.0f} "
                f"minutes on {part['made'][:10]}, {part['processor']}.")
    together = ""
    if "together" in measured:
        together = (f" Two processes at once add vectors at {measured['together']:.2f} of the speed of one alone: by "
                    "so much, or more, codecs are slower here than on two machines.")
    made = ", its pictures and the table in README" if name == "results" else " and its pictures"
    if command == _command(quick=False):
        command = "make lab"
    lines = [
        "# What compression buys on a network", "",
        f"`{command}` made this page{made} "
        f"from `{name}.json`, in "
        f"{measured['minutes']:.0f} minutes on {measured['made'][:10]}; {measured['cores']} cores, "
        f"{measured['processor']}, Linux {measured['kernel']}, load {measured['load_before']:.1f} before it began."
        f"{together}{kept}", "",
        "Each host is a network namespace of one machine; links to a switch between them are shaped in both "
        "directions by a token bucket that lets 1 ms of traffic through at once. One Horovod rank on each host, "
        f"{TRANSPORTS[measured['transport']]}, kernels on, one thread. All hosts share the machine's "
        "cores, so encoding and decoding on 4 hosts takes longer than on 4 machines.", "",
        "An exchange is all of what Horovod's PyTorch optimizer does from the first gradient to the last mean: "
        "`encode` is what the training thread spends on compressing (and starting), `wait` what the network takes "
        "beyond that, `decode` everything else. Times are medians over steps of the slowest rank. Bytes are for one "
        "rank and step, received: expected from `stats()`, and counted by the interface, frames' headers and "
        "Horovod's own messages included, the first speed's.", ""]
    if "40 MB" in models and 2 in hosts:
        lines += ["## In short", "", _headline(measured, speeds), *_targets(measured, speeds)]
    lines += ["![Time of an exchange](results-exchange.png)".replace("results-", f"{name}-"), "", "## Exchanges", ""]
    for count in hosts:
        for model in models:
            lines += _exchanges(measured, count, model, speeds)
    lines += [line.replace("(results-", f"({name}-") for line in _training(measured, speeds)]
    lines += ["## Where there is little to gain, or nothing", "", *_not_paying(measured)]
    return "\n".join(lines).rstrip() + "\n"


# -- pictures ---------------------------------------------------------------------------------------------------------


def _axes(count: int, width: float) -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(width, 4.4), layout="constrained", squeeze=False)
    return pyplot, figure, axes[0]


def _draw_exchange(measured: Row, speeds: list[int], file: Path) -> None:
    """Encode, wait and decode as stacked bars, a panel for each speed."""
    pyplot, figure, axes = _axes(len(speeds), 4.2 * len(speeds))
    for axis, speed in zip(axes, speeds, strict=True):
        rows = _rows(measured, where="network", ranks=2, model="40 MB", mbit=speed)
        names = [row["codec"] for row in rows][::-1]
        left = [0.0] * len(rows)
        for part, color in (("encode", "#0072b2"), ("wait", "#bbbbbb"), ("decode", "#d55e00")):
            widths = [1000 * row[part] for row in rows][::-1]
            axis.barh(range(len(rows)), widths, left=left, color=color, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        dense = next((row["seconds"] for row in rows if row["codec"] == cases.FP32), None)
        for place, row in enumerate(reversed(rows)):
            if dense:
                axis.text(1000 * row["seconds"], place, f" {dense / row['seconds']:.3g} x", va="center", fontsize=7)
        axis.set_yticks(range(len(rows)), names if axis is axes[0] else [""] * len(rows), fontsize=8)
        axis.set_title(_rate(speed), fontsize=10)
        axis.set_xlabel("ms")
        axis.set_xlim(right=1.2 * max(left, default=1))
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle("A whole exchange of 40 MB of gradients, 2 hosts", fontsize=11)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _draw_training(measured: Row, speeds: list[int], file: Path) -> None:
    """Seconds to the target over the speed of the network, a panel for each framework."""
    frameworks = list(dict.fromkeys(row["framework"] for row in measured["training"]))
    pyplot, figure, axes = _axes(len(frameworks), 5.2 * len(frameworks))
    for axis, framework in zip(axes, frameworks, strict=True):
        rows = [row for row in measured["training"] if row["framework"] == framework]
        for codec in dict.fromkeys(row["codec"] for row in rows):
            found = [(row["mbit"], time[0]) for row in rows
                     if row["codec"] == codec and (time := _time_to_target(measured, row))]
            if found:
                axis.plot(*zip(*sorted(found), strict=True), marker="o", label=codec)
        axis.set(xscale="log", yscale="log", xlabel="Mbit/s", title="PyTorch" if framework == "torch" else "TensorFlow")
        axis.grid(alpha=0.25, which="both")
        axis.set_xticks(speeds, [str(speed) for speed in speeds])
        axis.minorticks_off()
    axes[0].set_ylabel("seconds to the target accuracy")
    axes[-1].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
