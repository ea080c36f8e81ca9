"""What is sent in the laboratory: lists of shapes, codecs, and what they are called."""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[int, ...]

SPEEDS = (100, 1000, 10000)
"""Mbit/s."""


def forty_megabytes() -> list[Shape]:
    """10 matrices of 1,000,000 float32."""
    return [(1000, 1000)] * 10


def resnet50() -> list[Shape]:
    """The 161 parameters of ResNet-50 v1 for 1,000 classes: 25.6 million numbers, 102 MB."""
    return list(_resnet50())


def _resnet50() -> Iterator[Shape]:
    yield from _convolution(64, 3, 7)
    before = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            yield from _convolution(width, before, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(4 * width, width, 1)
            if block == 0:
                yield from _convolution(4 * width, before, 1)
            before = 4 * width
    yield from ((1000, 2048), (1000,))


def _convolution(out: int, into: int, size: int) -> list[Shape]:
    return [(out, into, size, size), (out,), (out,)]  # and its batch normalization


def bert_base() -> list[Shape]:
    """The 199 parameters of BERT-base, uncased, with its pooler: 109.5 million numbers, 438 MB."""
    width, inner = 768, 3072
    result: list[Shape] = [(30522, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(12):
        result += [(width, width), (width,)] * 4 + [(width,), (width,)]
        result += [(inner, width), (inner,), (width, inner), (width,), (width,), (width,)]
    return [*result, (width, width), (width,)]


MODELS = {"40 MB": forty_megabytes, "ResNet-50": resnet50, "BERT-base": bert_base}

FP32, FP16 = "dense fp32", "dense fp16"
DENSE = [FP32, FP16]
"""Stock Horovod, ``Compression.none`` and ``Compression.fp16``."""
HEADLINE = ["fp16", "uniform(bits=8)", "uniform(bits=4)", "sign", "topk(ratio=0.01)", "topk(ratio=0.001)",
            "powersgd(rank=4)"]
OTHERS = [("uniform(bits=8)", "gather"), ("uniform(bits=8)", "sum"), ("sign", "gather"),
          ("topk(ratio=0.001)", "sparse_split")]
"""Exchanges that ``auto`` does not take, measured on more than two hosts; on two, all of them send the same bytes."""


def rows(hosts: int) -> list[tuple[str, str]]:
    """``(codec, exchange)`` of everything that is measured."""
    result = [(name, "") for name in DENSE] + [(spec, "auto") for spec in HEADLINE]
    return result + (OTHERS if hosts > 2 else [])


TARGETS = {"topk(ratio=0.001)": (250, 25, 7), "sign": (25, 15, 4), "uniform(bits=8)": (3.5, 3, 2)}
"""At least so many times faster than dense fp32 at each of SPEEDS, 2 hosts, 40 MB, codec included."""
