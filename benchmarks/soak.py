"""Train for long on a few Horovod ranks, and see that nothing creeps: ``make soak``.

    horovodrun -np 2 --gloo python benchmarks/soak.py --steps 20000

Tensors with codecs and exchanges that differ in kind, one under Deep Gradient Compression, all of a step on their
way together. Checked as it runs and at
the end: the sum of outputs plus the mean residual is the sum of mean gradients, all ranks have the same
bits, memory stays what it was after the first tenth. Speed at the end and at the start is reported.
"""

from __future__ import annotations

import argparse
import sys
import time

import horovod.torch as hvd
import psutil
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.exchange.two_stage import OWNER, bounds
from hvd_gradcomp.plan import Slot

CODECS = {
    "fp16": "fp16", "uniform": "uniform(bits=4, stochastic=True)", "sign": "sign", "topk": "topk(ratio=0.02)",
    "chain": "topk(ratio=0.05) + uniform(bits=8)", "randomk": "randomk(ratio=0.05)", "powersgd": "powersgd(rank=2)",
    "vq": "vq(dim=4, codewords=16)", "dense": "none", "chunks": "uniform(bits=2)", "split": "topk(ratio=0.02)",
}
EXCHANGES = {"chunks": "two_stage", "split": "sparse_split"}
DGC, MOMENTUM = "dgc", 0.9
NAMES = [*CODECS, DGC]
"""The last one is under an optimizer of its own, for Deep Gradient Compression."""
SHAPE = (64, 48)
TOLERANCES = {"fp16": 2e-3, DGC: 2e-5}
"""Per step: what fp16 rounds in flight is in no residual; DGC's numbers are larger."""
ALLOWED_GROWTH = 16 * 2**20
"""Bytes of resident memory: what allocators and Horovod's own tables take late."""


def gradient(name: str, step: int, rank: int) -> torch.Tensor:
    """Normal numbers that repeat after 50 steps, so that their sums stay cheap to know."""
    seed = 100_000 * sorted(NAMES).index(name) + 100 * (step % 50) + rank
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", metavar="N", type=int, default=20_000, help="default: 20000")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    rank, ranks = hvd.rank(), hvd.size()

    params = {name: torch.nn.Parameter(torch.zeros(SHAPE)) for name in NAMES}
    named = [(name, params[name]) for name in CODECS]
    optimizer = gradcomp.DistributedOptimizer(torch.optim.SGD([param for _, param in named], lr=1.0), named, CODECS,
                                              min_size=0, exchange=EXCHANGES)
    other = gradcomp.DGCOptimizer(torch.optim.SGD([params[DGC]], lr=1.0, momentum=MOMENTUM), [(DGC, params[DGC])],
                                  0.02, warmup_steps=0, min_size=0, value_codec="uniform(bits=8)")
    slots = {**optimizer.compression.plan.slots, **other.compression.plan.slots}
    grads = {name: [gradient(name, step, rank) for step in range(50)] for name in NAMES}
    means = {name: [sum(gradient(name, step, r).double() for r in range(ranks)) / ranks for step in range(50)]
             for name in CODECS}
    outs = {name: torch.zeros(SHAPE, dtype=torch.float64) for name in NAMES}
    wants = {name: torch.zeros(SHAPE, dtype=torch.float64) for name in NAMES}  # of DGC this rank's own

    tenth = max(args.steps // 10, 1)
    resident: list[int] = []
    seconds: list[float] = []
    begin = time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        other.zero_grad()
        velocity = slots[DGC].state["momentum"].double().view(SHAPE)
        wants[DGC] += MOMENTUM * velocity + grads[DGC][step % 50]
        torch.autograd.backward([(params[name] * grads[name][step % 50]).sum() for name in NAMES])  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        other.synchronize()
        for name, param in params.items():
            assert param.grad is not None
            outs[name] += param.grad.double()
            if name != DGC:
                wants[name] += means[name][step % 50]
        if (step + 1) % tenth == 0:
            resident.append(psutil.Process().memory_info().rss)
            seconds.append(time.perf_counter() - begin)
            lost = check(slots, outs, wants, step + 1)
            if rank == 0:
                print(f"{step + 1} steps: {tenth / seconds[-1]:.0f} steps/s, {resident[-1] / 2**20:.0f} MB, "
                      f"largest loss {lost:.1e}", flush=True)
            begin = time.perf_counter()
    grown = max(resident[1:], default=resident[0]) - resident[0]
    if grown > ALLOWED_GROWTH:
        sys.exit(f"memory grew by {grown / 2**20:.0f} MB after the first tenth")
    if rank == 0:
        print(f"ok: memory grew by {max(grown, 0) / 2**20:.1f} MB, the last tenth took "
              f"{seconds[-1] / seconds[0]:.2f} times as long as the first", flush=True)


def check(slots: dict[str, Slot], outs: dict[str, torch.Tensor], wants: dict[str, torch.Tensor], steps: int) -> float:
    """Exit unless nothing was lost and all ranks have the same bits; the largest difference from the law."""
    worst = 0.0
    for name, out in outs.items():
        state = slots[name].state
        residual = state.get("residual", torch.zeros(out.numel())).double()
        if OWNER in state:
            begin, end = bounds(out.numel(), hvd.size())[hvd.rank()]
            residual[begin:end] += hvd.size() * state[OWNER][: end - begin]
        mean = hvd.allreduce(residual.view(SHAPE), name=f"soak.residual.{name}")
        want = hvd.allreduce(wants[name], name=f"soak.want.{name}")
        lost = float((out + mean - want).abs().max())
        worst = max(worst, lost)
        # Roundings add up like a random walk, at worst in a line.
        if lost > steps * TOLERANCES.get(name, 2e-6) + 1e-4:
            sys.exit(f"{name}: {lost} was lost in {steps} steps")
        everyone = hvd.allgather(out.unsqueeze(0), name=f"soak.same.{name}")
        if not all(torch.equal(everyone[0], each) for each in everyone):
            sys.exit(f"{name}: the ranks differ after {steps} steps")
    return worst


if __name__ == "__main__":
    main()
