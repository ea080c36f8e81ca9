"""What every codec does to real gradients: relative error, cosine and ratio, as tables in docs/codecs.md.

The gradients are those of a CNN on MNIST and of a small transformer language model on Python's own
standard library, at three points of training. Each codec sees several steps in a row, without error
feedback, so that what it keeps between steps (a warm start, a codebook) has settled; the last one counts.
"""

from __future__ import annotations

import argparse
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import nn
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import data  # noqa: E402 - beside the examples
import pytorch_mnist  # noqa: E402

from hvd_gradcomp import __version__, stats  # noqa: E402
from hvd_gradcomp.codecs.registry import CODECS  # noqa: E402
from hvd_gradcomp.collectives.local import LocalWorld  # noqa: E402

SPECS = [*(str(cls()) for name, cls in CODECS.items() if name != "none"),
         "uniform(bits=4)", "uniform(bits=2)", "topk(ratio=0.001)", "topk(ratio=0.001) + uniform(bits=8)",
         "vq(dim=8, codebook='learned', refresh=4)", "powersgd(rank=1)", "powersgd(rank=4) + fp16"]
POINTS = (0, 50, 200)
"""Steps of training at which gradients are taken."""
IN_A_ROW = 6
SMALLEST = 4096
"""Elements of the smallest tensor that is looked at."""

Steps = list[dict[str, np.ndarray[Any, Any]]]


def cnn() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """The network of examples/pytorch_mnist.py and its losses."""
    train, _ = data.load()
    model = pytorch_mnist.network()
    for epoch in range(100):
        for batch in data.batches(train, 32, 0, epoch):
            images, labels = pytorch_mnist.tensors(batch)
            yield model, cross_entropy(model(images), labels)


class LanguageModel(nn.Module):
    """A byte-level transformer: 2 layers, width 128, context 64; 0.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        self.position = nn.Parameter(0.02 * torch.randn(64, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, 64, 256]`` of the next byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embedding(tokens) + self.position, mask=mask, is_causal=True))


def language_model() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """The transformer and its losses on the source of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.tensor(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    model, draws = LanguageModel(), torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - 65, (32,), generator=draws)
        window = torch.stack([text[start:start + 65] for start in starts.tolist()])
        yield model, cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def record(losses: Iterator[tuple[nn.Module, torch.Tensor]]) -> dict[int, Steps]:
    """Train; the gradients of IN_A_ROW steps from each of POINTS on."""
    taken: dict[int, Steps] = {point: [] for point in POINTS}
    optimizer: torch.optim.Optimizer | None = None
    for step, (model, loss) in enumerate(losses):
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for point in POINTS:
            if point <= step < point + IN_A_ROW:
                taken[point].append({name: p.grad.numpy().copy() for name, p in model.named_parameters()
                                     if p.grad is not None and p.numel() >= SMALLEST})
        if step >= POINTS[-1] + IN_A_ROW:
            return taken
        optimizer.step()
    raise AssertionError("the data ran out")


def effect(spec: str, steps: Steps) -> tuple[float, float, float]:
    """(relative L2 error, cosine, ratio) over all tensors of the last step."""
    world = LocalWorld(spec, {name: grad.shape for name, grad in steps[0].items()}, ranks=1, error_feedback=False)
    for grads in steps:
        decoded = world.step([grads])[0]
    error = dot = norm = size = 0.0
    for name, grad in steps[-1].items():
        error += float(((grad - decoded[name]) ** 2).sum())
        dot += float((grad * decoded[name]).sum())
        norm += float((grad ** 2).sum())
        size += float((decoded[name] ** 2).sum())
    # the ratio of two ranks, so that summed and gathered payloads compare
    slots = world.plans[0].slots.values()
    ratio = sum(stats.dense_step_bytes(slot, 2) for slot in slots) / sum(stats.step_bytes(slot, 2) for slot in slots)
    return (error / norm) ** 0.5, dot / (norm * size) ** 0.5 if size else 0.0, ratio


def table(title: str, taken: dict[int, Steps]) -> str:
    """One Markdown table: a row per codec, error and cosine at each point."""
    head = "".join(f" error @{point} | cosine @{point} |" for point in POINTS)
    lines = [f"### {title}", "", f"| codec | ratio |{head}", "|---|---:|" + "---:|" * (2 * len(POINTS))]
    for spec in track(SPECS, title, transient=True):
        rows = [effect(spec, taken[point]) for point in POINTS]
        cells = "".join(f" {error:.3f} | {cosine:.3f} |" for error, cosine, _ in rows)
        lines.append(f"| `{spec}` | {rows[0][2]:.1f} |{cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "codecs.md",
                        help="file whose part between the 'measured' markers is written anew")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = [f"Measured by `make docs-codecs` with hvd_gradcomp {__version__}, torch {torch.__version__}, numpy "
             f"{np.__version__}, Python {platform.python_version()} on {platform.machine()}.",
             table("CNN on MNIST", record(cnn())),
             table("Transformer language model", record(language_model()))]
    text = args.into.read_text(encoding="utf-8")
    begin, end = "<!-- measured: begin -->\n", "<!-- measured: end -->"
    before, rest = text.split(begin)
    args.into.write_text(before + begin + "\n\n".join(parts) + "\n" + end + rest.split(end)[1], encoding="utf-8")
    print(f"written: {args.into}")


if __name__ == "__main__":
    main()
