"""``bench``: encode and decode time against a copy of the same memory, bytes, and error."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvd_gradcomp import coding, kernels, require
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.exchange import choose
from hvd_gradcomp.exchange.base import Received
from hvd_gradcomp.memory import remember
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.plan import Plan
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.spec import TensorSpec, parse

REPEATS, SECONDS = 5, 1.0
"""Each time is the median of at least REPEATS runs that take at least SECONDS together."""


def add_arguments(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "bench", help="measure codecs", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure codecs on one rank. Times are medians; 'encode' includes error feedback (add the\n"
                    "residual, encode, keep what was not sent), 'decode' adds one payload to an accumulator, and both\n"
                    "are also given as multiples of a copy of the tensor's memory, measured in the same run.",
        epilog="example:\n  python -m hvd_gradcomp bench --codec 'uniform(bits=8)' --codec 'topk(ratio=0.01)'")
    parser.add_argument("--codec", action="append", required=True, metavar="SPEC", help="may be given several times")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--numel", type=int, default=1 << 22, metavar="N",
                        help="elements of a made-up gradient (default 4194304), as square a matrix as N allows")
    source.add_argument("--shape", type=_shape, metavar="ROWSxCOLS", help="its shape, such as 4096x6104")
    source.add_argument("--tensor", type=Path, metavar="FILE.npy", help="a gradient of your own")
    parser.add_argument("--backend", choices=("numpy", "torch", "tensorflow"), default="torch")
    parser.add_argument("--threads", type=int, default=1, metavar="T",
                        help="threads of the framework and of the kernels (default 1)")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw speed and error over ratio")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    from rich.console import Console
    from rich.progress import track

    codecs = [parse(spec) for spec in options.codec]
    backend = Backend(options.backend, options.threads)
    gradient = _gradient(options)
    rows = [measure(codec, gradient, backend) for codec in
            track(codecs, "measuring", console=Console(stderr=True), transient=True, disable=options.json)]
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows)


class Backend:
    """The operations of one framework, and what timing needs of it."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        kernels.set_threads(threads)
        self.ops: Ops
        self.array: Callable[[Any], Array] = lambda x: x
        self.state: Callable[[Array], Array] = lambda x: x
        self.compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f
        if name == "numpy":
            from hvd_gradcomp.ops.numpy import NumpyOps

            self.ops = NumpyOps()
        elif name == "torch":
            torch = require.framework("torch", "torch")
            from hvd_gradcomp.ops.torch import TorchOps

            torch.set_num_threads(threads)
            self.ops, self.array = TorchOps(), torch.from_numpy
        else:
            tf = require.framework("tensorflow", "tensorflow")
            from hvd_gradcomp.ops.tensorflow import TensorflowOps

            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
            self.ops, self.array, self.state, self.compiled = TensorflowOps(), tf.constant, tf.Variable, tf.function


def measure(codec: Codec, gradient: np.ndarray[Any, Any], backend: Backend) -> dict[str, Any]:
    """One row: times in seconds, bytes of one rank's contribution per step, relative L2 error.

    Args:
        gradient: float32, of the shape that the codec is to see.
    """
    ops = backend.ops
    spec = TensorSpec("bench", gradient.shape)
    slot = Plan.make([spec], Policy.make(codec, 0), ranks=1).slots["bench"]
    slot.state = {name: backend.state(ops.zeros((length,), dtype))
                  for name, (length, dtype) in slot.state_layout(memory=True, ranks=1).items()}
    exchange = choose(codec, spec, ranks=1)
    ctx = Ctx(ops, spec, ranks=1, rank=0, seed=0, state=slot.state, buffers=slot.buffers)
    grad = backend.array(np.ascontiguousarray(gradient.reshape(-1)))
    ok = ops.constant([1.0], "float32")
    memory = remember(ops, grad, slot.state)

    def encode() -> Received:
        return _drive(exchange.rounds(codec, memory, ctx), ops)

    def encode_and_settle() -> Any:
        coding.settle(encode(), memory, ctx, ok)
        return ok

    received = encode()
    decoded = np.asarray(received.sent(ops.zeros((spec.numel,))))
    flat = gradient.reshape(-1)
    accumulator = ops.zeros((spec.numel,))
    source, target = flat.copy(), np.zeros_like(flat)
    wire = sum(nbytes for _, nbytes in exchange.sends(codec, spec, ranks=1))
    return {
        "codec": str(codec), "backend": backend.name, "numel": spec.numel, "threads": backend.threads,
        "kernels": kernels.status(),
        "encode_s": median(backend.compiled(encode_and_settle)),
        "decode_s": median(backend.compiled(lambda: received.sent(accumulator))),
        "memcpy_s": median(lambda: np.copyto(target, source)),
        "wire_bytes": wire, "ratio": 4 * spec.numel / wire,
        "rel_error": float(np.linalg.norm(flat - decoded) / np.linalg.norm(flat)),
    }


def _drive(rounds: Any, ops: Ops) -> Received:
    """Run an exchange of one rank: everyone's contribution is its own."""
    answer = None
    while True:
        try:
            send = rounds.send(answer)
        except StopIteration as end:
            return end.value
        answer = {name: ops.reshape(part, (1, int(part.shape[0]))) if send.how == "gather" else part
                  for name, part in send.parts.items()}


def median(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    call()  # the first run allocates, and traces where there is something to trace
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _gradient(options: argparse.Namespace) -> np.ndarray[Any, Any]:
    if options.tensor is not None:
        loaded: np.ndarray[Any, Any] = np.load(options.tensor)
        if loaded.size == 0:
            raise SpecError(f"{options.tensor} holds no elements")
        return loaded.astype(np.float32)
    if options.shape is None and options.numel < 1:
        raise SpecError(f"--numel must be at least 1, not {options.numel}")
    shape = options.shape or _squarest(options.numel)
    # Gradients are heavy-tailed: a few large entries and many small ones.
    return np.random.default_rng(0).standard_t(3, size=shape).astype(np.float32)


def _squarest(numel: int) -> tuple[int, int]:
    rows = next(r for r in range(math.isqrt(numel), 0, -1) if numel % r == 0)
    return rows, numel // rows


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 4096x6104")
    return shape


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    table = Table(title=f"{first['numel']:,} float32, {first['backend']}, {first['threads']} thread(s), "
                        f"kernels: {first['kernels']}; a copy takes "
                        f"{1e3 * first['memcpy_s']:.2f} ms")
    for column in ("codec", "encode ms", "x copy", "decode ms", "x copy", "bytes", "ratio", "rel. error"):
        table.add_column(column, justify="left" if column == "codec" else "right", no_wrap=True)
    for row in rows:
        table.add_row(row["codec"], f"{1e3 * row['encode_s']:.2f}", f"{row['encode_s'] / row['memcpy_s']:.2f}",
                      f"{1e3 * row['decode_s']:.2f}", f"{row['decode_s'] / row['memcpy_s']:.2f}",
                      f"{row['wire_bytes']:,}", f"{row['ratio']:.2f}", f"{row['rel_error']:.2e}")
    console = Console()
    console.width = max(console.width, 140)  # what is piped into a file has room
    console.print(table)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Encode time and error over ratio, one point per codec."""
    matplotlib = require.framework("matplotlib", "plot")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, error) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for axis, values, label in ((speed, [r["encode_s"] / r["memcpy_s"] for r in rows], "encode time / copy"),
                                (error, [r["rel_error"] for r in rows], "relative error")):
        axis.scatter([r["ratio"] for r in rows], values)
        for row, value in zip(rows, values, strict=True):
            axis.annotate(row["codec"], (row["ratio"], value), fontsize=8, xytext=(4, 4), textcoords="offset points")
        axis.set(xscale="log", xlabel="compression ratio", ylabel=label)
        axis.grid(alpha=0.3)
    speed.set_yscale("log")
    figure.suptitle(f"{rows[0]['numel']:,} float32, {rows[0]['backend']}, {rows[0]['threads']} thread(s)")
    figure.savefig(file, dpi=120)
    plt.close(figure)
