"""Train a PyTorch network on Fashion-MNIST (or MNIST) under Horovod with Deep Gradient Compression."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import common
import data
import horovod.torch as hvd
import torch
from pytorch_mnist import evaluate, tensors
from torch import nn
from torch.nn.functional import cross_entropy

import hvd_gradcomp.torch as gradcomp


def network() -> nn.Sequential:
    """Two convolutions and two dense layers, 1,024,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 640), nn.ReLU(), nn.Linear(640, data.CLASSES))


def wrap(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.SGD, steps: int) -> Any:
    """Deep Gradient Compression, or with ``--compression`` error feedback around any codec, to compare."""
    if args.compression is None:
        return gradcomp.DGCOptimizer(optimizer, model.named_parameters(), **common.dgc_settings(args, steps))
    return gradcomp.DistributedOptimizer(optimizer, model.named_parameters(), args.compression,
                                         min_size=args.min_size, exchange=args.exchange)


def main() -> None:
    parser = common.parser(__file__, __doc__, dgc=True, epochs=6)
    parser.add_argument("--data", metavar="DIR", type=Path, help="folder of Fashion-MNIST (default: Debian's)")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    torch.manual_seed(args.seed)

    name, train, test = data.load_best(args.data)
    train = data.shard(train, hvd.rank(), hvd.size())
    steps = data.steps_per_epoch(train, args.batch_size)
    model = network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    # The SGD as it would be without compression, and around it all that DGC takes.
    optimizer = wrap(args, model, torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9), steps)

    result = common.Result.start("PyTorch", args, hvd.size(), sum(p.numel() for p in model.parameters()))
    result.more["data"] = name
    seconds = 0.0
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = common.learning_rate(args, epoch)
        order = data.batches(train, args.batch_size, args.seed, epoch)
        for batch in common.progress(order, steps, epoch, args.epochs, hvd.rank()):
            images, labels = tensors(batch)
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        seconds += time.perf_counter() - begin
        if hvd.rank() == 0:  # all ranks have the same weights
            result.epoch_done(*evaluate(model, test), optimizer.compression.stats())
    if hvd.rank() == 0:
        result.finish(seconds, args.json)


if __name__ == "__main__":
    main()
