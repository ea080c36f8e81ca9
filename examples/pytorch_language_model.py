"""Train a small transformer on the source of Python's standard library, byte by byte, under Horovod."""

from __future__ import annotations

import math
import time

import common
import horovod.torch as hvd
import text
import torch
from pytorch_dgc import wrap
from torch import nn
from torch.nn.functional import cross_entropy

LENGTH = 32


class Transformer(nn.Module):
    """Two layers of width 224 that look back only: 1,333,000 parameters."""

    def __init__(self, width: int = 224, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(text.VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                                           norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, text.VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, LENGTH, 256]`` of the next byte, for bytes ``[batch, LENGTH]``."""
        x = self.bytes(tokens) + self.places.weight
        return self.out(self.layers(x, mask=self.mask, is_causal=True))


def loss_and_hits(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss in nats per byte, and the share of bytes predicted right."""
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    return cross_entropy(logits.flatten(0, 1), targets.flatten()), (logits.argmax(-1) == targets).float().mean()


@torch.no_grad()
def evaluate(model: nn.Module, test: text.Bytes) -> tuple[float, float]:
    """Loss and accuracy over the same 1024 windows each time."""
    found = [loss_and_hits(model, torch.from_numpy(batch)) for batch in text.windows(test, LENGTH, 64, 16, seed=0)]
    return tuple(float(torch.stack(each).mean()) for each in zip(*found, strict=True))  # type: ignore[return-value]


def main() -> None:
    parser = common.parser(__file__, __doc__, dgc=True, epochs=10)
    parser.add_argument("--steps", metavar="N", type=int, default=200, help="steps per epoch (default: 200)")
    parser.set_defaults(batch_size=16)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    torch.manual_seed(args.seed)

    train, test = text.load()
    model = Transformer()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(args, model, torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9), args.steps)

    result = common.Result.start("PyTorch", args, hvd.size(), sum(p.numel() for p in model.parameters()))
    seconds = 0.0
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = common.learning_rate(args, epoch)
        seed = (args.seed * args.epochs + epoch) * hvd.size() + hvd.rank()
        order = text.windows(train, LENGTH, args.batch_size, args.steps, seed)
        for batch in common.progress(order, args.steps, epoch, args.epochs, hvd.rank()):
            optimizer.zero_grad()
            loss_and_hits(model, torch.from_numpy(batch))[0].backward()
            optimizer.step()
        seconds += time.perf_counter() - begin
        if hvd.rank() == 0:  # all ranks have the same weights
            result.epoch_done(*evaluate(model, test), optimizer.compression.stats())
    if hvd.rank() == 0:
        result.more["perplexity per byte"] = f"{math.exp(result.loss):.3f}"
        result.finish(seconds, args.json)


if __name__ == "__main__":
    main()
