"""A program for test_faults.py: in the second step the last rank does what the first argument says.

Every rank that ends with an error writes its name and text into the folder of the second argument.
"""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvd_gradcomp.torch as gradcomp

FAULT, FOLDER = sys.argv[1], Path(sys.argv[2])


class Fault(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if FAULT == "raise":
            raise ZeroDivisionError("a mistake in the user's backward pass")
        if FAULT == "kill":
            # Horovod looks whether it was shut down and then queues a collective; one that is queued in between may
            # never be answered. So the others are to wait already.
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    named = [*((f"first.{name}", p) for name, p in first.named_parameters()),
             *((f"second.{name}", p) for name, p in second.named_parameters())]
    optimizer = gradcomp.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named,
                                              "powersgd(rank=2)", min_size=0)
    for step in range(4):
        x = first(torch.randn(16, 64))
        if step == 1 and hvd.rank() == hvd.size() - 1:
            x = Fault.apply(x)  # the exchanges of the second layer are under way when it is reached
        optimizer.zero_grad()
        second(x).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    # Horovod's launcher asks the others to end as soon as one rank has, and kills them 5 seconds later. They are to
    # say first what they saw of it; where they are stuck is printed.
    faulthandler.register(signal.SIGTERM)
    try:
        main()
    except Exception as error:
        (FOLDER / f"rank{hvd.rank()}").write_text(f"{type(error).__name__}: {error}")
        raise
