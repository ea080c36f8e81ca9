"""Train a small PyTorch network on MNIST under Horovod, with compressed gradients."""

from __future__ import annotations

import time

import common
import data
import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hvd_gradcomp.torch as gradcomp


def network() -> nn.Sequential:
    """Two convolutions and two dense layers, 106,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, data.CLASSES))


def tensors(digits: data.Digits) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``[n, 1, 28, 28]`` and labels ``[n]``."""
    return torch.from_numpy(digits.images).unsqueeze(1), torch.from_numpy(digits.labels)


@torch.no_grad()
def evaluate(model: nn.Module, digits: data.Digits) -> tuple[float, float]:
    """Loss and accuracy."""
    images, labels = tensors(digits)
    outputs = model(images)
    return float(cross_entropy(outputs, labels)), float((outputs.argmax(1) == labels).float().mean())


def main() -> None:
    args = common.parser(__file__, __doc__).parse_args()
    hvd.init()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    torch.manual_seed(args.seed)

    train, test = data.load()
    train = data.shard(train, hvd.rank(), hvd.size())
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # All that compression takes: this object, given to Horovod's own optimizer.
    compression = gradcomp.Compression(args.compression, named_parameters=model.named_parameters(),
                                       min_size=args.min_size, exchange=args.exchange)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=compression)

    result = common.Result.start("PyTorch", args, hvd.size(), sum(p.numel() for p in model.parameters()))
    steps = data.steps_per_epoch(train, args.batch_size)
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
            result.epoch_done(*evaluate(model, test), compression.stats())
    if hvd.rank() == 0:
        result.finish(seconds, args.json)


if __name__ == "__main__":
    main()
