"""What each host runs: the time of whole exchanges, and where it goes. Started by the laboratory with mpirun.

An exchange begins when the first gradient is handed to Horovod and ends when the optimizer may use the last one. The
gradients are there before, and are handed over in the order of a backward pass, by calling the hooks that Horovod
registered; no time of a backward pass is in the numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import cases
import horovod.torch as hvd
import net
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.exchange.base import wire_bytes

LONG = 15.0
"""Seconds of a first step from which on it is the only one."""


class Clock:
    """Seconds spent in compressing and in waiting for the network, of what passes through."""

    def __init__(self, compression: Any) -> None:
        self.inner = compression
        self.encode = self.wait = 0.0
        self._waiting = hvd.synchronize

    def compress(self, tensor: torch.Tensor) -> Any:
        began = time.perf_counter()
        result = self.inner.compress(tensor)
        self.encode += time.perf_counter() - began
        return result

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return self.inner.decompress(tensor, ctx)

    def synchronize(self, handle: int) -> torch.Tensor:
        began = time.perf_counter()
        result = self._waiting(handle)
        self.wait += time.perf_counter() - began
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(cases.MODELS), default="40 MB")
    parser.add_argument("--rows", nargs="+", help="CODEC, or CODEC|EXCHANGE; default: all")
    parser.add_argument("--shapes", nargs="+", help="other shapes than the model's, such as 10x1000")
    parser.add_argument("--min-size", type=int, help="default: the library's own")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timed steps for each row (default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="at most (default: 20)")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    shapes = cases.MODELS[args.model]()
    if args.shapes:
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    todo = [(*row.split("|"), "auto")[:2] for row in args.rows] if args.rows else cases.rows(hvd.size())
    generator = torch.Generator().manual_seed(hvd.rank())
    # Gradients are not normal: most of a real one's entries are near zero.
    given = [torch.randn(shape, generator=generator) ** 3 * 1e-3 for shape in shapes]
    params = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.empty_like(param)
    waiting = hvd.synchronize
    results = []
    for spec, exchange in todo:
        results.append(measure(spec, exchange, params, given, args))
        hvd.synchronize = hvd.optimizer.synchronize = waiting
        gc.collect()
    if hvd.rank() == 0:
        args.json.write_text(json.dumps(results))
    hvd.barrier()


def measure(spec: str, exchange: str, params: list[Any], given: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """One row of the results: medians over steps, of each step the slowest rank's."""
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    compression = _compression(spec, exchange, named, args.min_size)
    clock = Clock(compression)
    # Both places where Horovod's function is known by name; in this process only.
    hvd.synchronize = hvd.optimizer.synchronize = clock.synchronize
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), named_parameters=named, compression=clock)

    def step() -> dict[str, float]:
        for param, gradient in zip(params, given, strict=True):
            assert param.grad is not None
            param.grad.copy_(gradient)
        hvd.barrier()
        clock.encode = clock.wait = 0.0
        before, began = net.counters(device), time.perf_counter()
        if hvd.size() > 1:
            for param in reversed(params):
                optimizer._make_hook(param)(param)
        optimizer.synchronize()
        seconds = time.perf_counter() - began
        after = net.counters(device)
        return {"seconds": seconds, "encode": clock.encode, "wait": clock.wait,
                "decode": seconds - clock.encode - clock.wait, **{name: after[name] - before[name] for name in after}}

    device = "eth0" if Path("/sys/class/net/eth0").exists() and hvd.size() > 1 else "lo"
    first = step()
    slowest = float(hvd.allreduce(torch.tensor([first["seconds"]]), op=hvd.Max)[0])
    if slowest > LONG:
        samples, steps = [first], 1
    else:
        step()
        steps = max(3, min(args.steps, round(args.seconds / slowest)))
        samples = [step() for _ in range(steps)]
    everyone = hvd.allgather_object(samples)
    slow = [max((rank[i] for rank in everyone), key=lambda sample: sample["seconds"]) for i in range(steps)]
    numel = sum(param.numel() for param in params)
    row = {"codec": spec, "exchange": exchange, "ranks": hvd.size(), "numbers": numel, "tensors": len(params),
           "steps": steps, "first_step_only": slowest > LONG,
           "seconds": statistics.median(sample["seconds"] for sample in slow),
           "fastest": min(sample["seconds"] for sample in slow)}
    typical = sorted(slow, key=lambda sample: sample["seconds"])[steps // 2]  # its parts add up, medians would not
    row |= {name: typical[name] for name in ("encode", "wait", "decode")}
    row |= {f"counted_{name}": statistics.median(sample[name] for rank in everyone for sample in rank)
            for name in ("rx", "tx")}
    row["expected"] = _expected(spec, compression, numel)
    if spec not in cases.DENSE:  # the hooks on the parameters keep it alive, but the next needs the memory
        for slot in compression.plan.slots.values():
            slot.state.clear()
            slot.buffers.clear()
    if hvd.rank() == 0:
        print(f"{spec} {exchange}: {1000 * row['seconds']:.1f} ms = encode {1000 * row['encode']:.1f} + wait "
              f"{1000 * row['wait']:.1f} + decode {1000 * row['decode']:.1f}, {row['counted_rx']:,.0f} bytes, expected "
              f"{row['expected']:,.0f}, largest memory {_memory():,} MB", flush=True)
    return row


def _compression(spec: str, exchange: str, named: list[Any], min_size: int | None) -> Any:
    if spec in cases.DENSE:
        return hvd.Compression.fp16 if spec == cases.FP16 else hvd.Compression.none
    options = {} if min_size is None else {"min_size": min_size}
    return gradcomp.Compression(spec, named, exchange=exchange, **options)


def _memory() -> int:
    """Megabytes that this rank has used at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _expected(spec: str, compression: Any, numel: int) -> float:
    """Bytes that a rank should receive in a step: what ``stats()`` says, or a ring's for the dense."""
    if spec in cases.DENSE:
        return wire_bytes("sum", numel * (2 if spec == cases.FP16 else 4), hvd.size())
    stats = compression.stats()
    return stats["wire_bytes_received"] / max(stats["steps"], 1)


if __name__ == "__main__":
    main()
