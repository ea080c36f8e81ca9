"""Measure what one small tensor costs through the torch adapter, without its collectives.

CPU time of ``compress`` and ``decompress`` in microseconds per tensor: a step of many tensors of 10,000
float32 on rank 0 of 2, in which every collective is answered at once with what it was asked to send (from
both ranks). Prints a line per codec; ``--profile`` adds where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from hvd_gradcomp.collectives import hvd_torch  # noqa: E402
from hvd_gradcomp.torch import compression as adapter  # noqa: E402

NUMEL, TENSORS, RANKS = 10_000, 10, 2
CODECS = ["none", "fp16", "uniform(bits=8)", "sign", "topk(ratio=0.01)", "randomk(ratio=0.01)"]


class Answers:
    """In place of ``horovod.torch``: what a collective gives is made once and given again in each step."""

    Sum, Max, Min, Average = "Sum", "Max", "Min", "Average"
    Compression = hvd_torch.hvd.Compression
    global_process_set = hvd_torch.hvd.global_process_set

    def __init__(self) -> None:
        self._results: dict[str, torch.Tensor] = {}

    def allgather_async(self, tensor: torch.Tensor, name: str, process_set: Any) -> torch.Tensor:
        return self._answer(name, lambda: torch.cat([tensor] * RANKS))

    def allreduce_async(self, tensor: torch.Tensor, name: str, op: Any, process_set: Any) -> torch.Tensor:
        return self._answer(name, tensor.clone)

    def _answer(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._results:
            self._results[name] = make()
        return self._results[name]

    def poll(self, handle: Any) -> bool:
        return True

    def synchronize(self, handle: Any) -> Any:
        return handle

    def size(self) -> int:
        return RANKS

    def rank(self) -> int:
        return 0


class Ranks:
    """In place of a process set."""

    ranks: ClassVar[list[int]] = list(range(RANKS))

    def size(self) -> int:
        return RANKS

    def rank(self) -> int:
        return 0

    def included(self) -> bool:
        return True


def measure(codec: str, profile: bool = False) -> float:
    """Microseconds of CPU time per tensor and step."""
    torch.set_num_threads(1)
    answers: Any = Answers()
    hvd_torch.hvd = adapter.hvd = answers
    params = [torch.nn.Parameter(torch.randn(NUMEL // 100, 100)) for _ in range(TENSORS)]
    compression = adapter.Compression(codec, [(f"layer{i}.weight", p) for i, p in enumerate(params)], min_size=0,
                                      process_set=Ranks(), exchange="gather" if codec != "none" else "sum")
    compression._agree = lambda: None  # type: ignore[method-assign]
    compression._ranks, compression._name, compression._place = Ranks.ranks, "bench", (0, RANKS)
    compression._sets = {None: Ranks()}
    compression._token, compression._token_checked = torch.ones(3), True
    grads = [torch.randn_like(p) for p in params]
    reduced = torch.ones(3)

    def step() -> float:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        start = time.process_time()
        contexts = []
        for param in params:
            compression._remember(param)  # as the hook of backward does
            contexts.append(compression.compress(param.grad)[1])  # type: ignore[arg-type]
        for context in contexts:
            compression.decompress(reduced, context)
        return time.process_time() - start

    for _ in range(5):
        step()
    if profile:
        profiler = cProfile.Profile()
        for _ in range(20):
            profiler.runcall(step)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    return 1e6 * statistics.median(step() for _ in range(100)) / TENSORS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", action="append", metavar="SPEC", help="may be given several times")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    for codec in args.codec or CODECS:
        print(f"{measure(codec, args.profile):7.1f} us  {codec}")


if __name__ == "__main__":
    main()
