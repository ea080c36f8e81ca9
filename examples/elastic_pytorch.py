"""Train under Horovod's elastic mode, with compressed gradients: ranks may be lost and join.

A rank that is killed takes what it kept for later with it; what the others keep is spread over those that
go on. Try it on one machine, which plays two hosts:

    printf '#!/bin/sh\\necho localhost:2\\necho 127.0.0.1:1\\n' > hosts.sh && chmod +x hosts.sh
    horovodrun -np 3 --min-np 1 --max-np 3 --network-interface lo --host-discovery-script ./hosts.sh \\
        python examples/elastic_pytorch.py --kill-at 30

The rank that is alone on its host kills itself at step 30; Horovod gives up that host, and the others go on
from the last commit.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import horovod.torch as hvd
import torch
from torch import nn

import hvd_gradcomp.torch as gradcomp


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's share of a step's data: 32 samples of a fixed linear map."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))
    return x, x @ torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", metavar="SPEC", default="topk(ratio=0.1)", help="default: topk(ratio=0.1)")
    parser.add_argument("--steps", metavar="N", type=int, default=60, help="default: 60")
    parser.add_argument("--commit-every", metavar="N", type=int, default=5, help="default: 5")
    parser.add_argument("--kill-at", metavar="STEP", type=int, help="the rank that is alone on its host dies there")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    compression = gradcomp.Compression(args.compression, named_parameters=model.named_parameters(), min_size=256)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05),
                                         named_parameters=model.named_parameters(), compression=compression)
    # The compression is part of the state, beside model and optimizer: nothing else is needed.
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, step=0)
    first_ranks = hvd.size()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < args.steps:
            if state.step == args.kill_at and hvd.local_size() == 1 and hvd.size() == first_ranks > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = batch(state.step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            state.step += 1
            if state.step % args.commit_every == 0:
                if hvd.rank() == 0:
                    print(f"step {state.step}: {hvd.size()} ranks, loss {loss.item():.3f}", flush=True)
                state.commit()

    train(state)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = hvd.allgather(weights.unsqueeze(0), name="weights")
    if not all(torch.equal(everyone[0], each) for each in everyone):
        sys.exit("the ranks ended with different weights")
    if hvd.rank() == 0:
        print(f"done: {hvd.size()} of {first_ranks} ranks, all with the same weights", flush=True)


if __name__ == "__main__":
    main()
