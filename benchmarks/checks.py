"""What the checks of every step cost one rank: the table in docs/state.md.

    python benchmarks/checks.py

Processor time of one thread, the shortest of several runs, without any transport: ranks in lockstep in one
process, divided by their number.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvd_gradcomp import payload
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.ops.torch import TorchOps

N = 4_000_000
SPECS = ["uniform(bits=8)", "sign", "topk(ratio=0.01)"]
RANKS = [2, 8]


def shortest(run: Callable[[], object], times: int = 5) -> float:
    """Milliseconds."""
    best = float("inf")
    for _ in range(times):
        begin = time.process_time()
        run()
        best = min(best, time.process_time() - begin)
    return 1000 * best


def main() -> None:
    torch.set_num_threads(1)
    ops = TorchOps()
    grad = torch.randn(N)
    print(f"everything is finite: {shortest(lambda: ops.largest(grad)):.2f} ms for {N:,} elements\n")
    print("| codec | payload | ranks | compress and decode, ms | with `verify=True` |\n|---|---|---|---|---|")
    for spec in SPECS:
        for ranks in RANKS:
            grads = [{"w": torch.from_numpy(np.random.default_rng(rank).normal(size=N).astype(np.float32))}
                     for rank in range(ranks)]
            worlds = [LocalWorld(spec, {"w": (N,)}, ranks, ops=ops, exchange="gather", verify=verify)
                      for verify in (False, True)]
            plain, verified = (shortest(partial(world.step, grads)) / ranks for world in worlds)
            slot = worlds[0].plans[0].slots["w"]
            assert slot.codec is not None
            size = payload.nbytes(slot.codec.layout(slot.spec))
            print(f"| `{spec}` | {size / 1e6:.2f} MB | {ranks} | {plain:.1f} | + {verified - plain:.1f} |", flush=True)


if __name__ == "__main__":
    main()
