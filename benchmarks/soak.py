"""Train for long on a few Horovod ranks, and see that nothing creeps: ``make soak``.

    horovodrun -np 2 --gloo python benchmarks/soak.py --steps 20000

Tensors with codecs that differ in kind, all of a step on their way together. Checked as it runs and at
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

CODECS = {
    "fp16": "fp16", "uniform": "uniform(bits=4, stochastic=True)", "sign": "sign", "topk": "topk(ratio=0.02)",
    "chain": "topk(ratio=0.05) + uniform(bits=8)", "randomk": "randomk(ratio=0.05)", "powersgd": "powersgd(rank=2)",
    "vq": "vq(dim=4, codewords=16)", "dense": "none",
}
SHAPE = (64, 48)
ALLOWED_GROWTH = 16 * 2**20
"""Bytes of resident memory: what allocators and Horovod's own tables take late."""


def gradient(name: str, step: int, rank: int) -> torch.Tensor:
    """Normal numbers that repeat after 50 steps, so that their sums stay cheap to know."""
    seed = 100_000 * sorted(CODECS).index(name) + 100 * (step % 50) + rank
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", metavar="N", type=int, default=20_000, help="default: 20000")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    rank, ranks = hvd.rank(), hvd.size()

    params = {name: torch.nn.Parameter(torch.zeros(SHAPE)) for name in CODECS}
    compression = gradcomp.Compression(CODECS, params.items(), min_size=0)
    optimizer = gradcomp.DistributedOptimizer(torch.optim.SGD(params.values(), lr=1.0), list(params.items()),
                                              compression)
    grads = {name: [gradient(name, step, rank) for step in range(50)] for name in CODECS}
    means = {name: [sum(gradient(name, step, r).double() for r in range(ranks)) / ranks for step in range(50)]
             for name in CODECS}
    outs = {name: torch.zeros(SHAPE, dtype=torch.float64) for name in CODECS}
    wants = {name: torch.zeros(SHAPE, dtype=torch.float64) for name in CODECS}

    tenth = max(args.steps // 10, 1)
    resident: list[int] = []
    seconds: list[float] = []
    begin = time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        torch.autograd.backward([(params[name] * grads[name][step % 50]).sum() for name in CODECS])  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        for name, param in params.items():
            assert param.grad is not None
            outs[name] += param.grad.double()
            wants[name] += means[name][step % 50]
        if (step + 1) % tenth == 0:
            resident.append(psutil.Process().memory_info().rss)
            seconds.append(time.perf_counter() - begin)
            lost = check(compression, outs, wants, step + 1)
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


def check(compression: gradcomp.Compression, outs: dict[str, torch.Tensor], wants: dict[str, torch.Tensor],
          steps: int) -> float:
    """Exit unless nothing was lost and all ranks have the same bits; the largest difference from the law."""
    worst = 0.0
    for name, out in outs.items():
        kept = compression.plan.slots[name].state.get("residual")
        residual = torch.zeros(SHAPE) if kept is None else kept.view(SHAPE)
        mean = hvd.allreduce(residual.double(), name=f"soak.residual.{name}")
        lost = float((out + mean - wants[name]).abs().max())
        worst = max(worst, lost)
        # Roundings add up like a random walk, at worst in a line; what fp16 rounds in flight is in no residual.
        if lost > steps * (2e-3 if name == "fp16" else 2e-6) + 1e-4:
            sys.exit(f"{name}: {lost} was lost in {steps} steps")
        everyone = hvd.allgather(out.unsqueeze(0), name=f"soak.same.{name}")
        if not all(torch.equal(everyone[0], each) for each in everyone):
            sys.exit(f"{name}: the ranks differ after {steps} steps")
    return worst


if __name__ == "__main__":
    main()
