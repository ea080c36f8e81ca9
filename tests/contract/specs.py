"""The one table of what the contract suite tests. A new codec adds its line here."""

from __future__ import annotations

from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.codecs.chain import Chain
from hvd_gradcomp.exchange import EXCHANGES
from hvd_gradcomp.spec import parse

SPECS: dict[str, tuple[str, ...]] = {
    "none": ("none",),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
    "uniform": ("uniform(bits=8)", "uniform(bits=4)", "uniform(bits=1, block=None)", "uniform(bits=3, block=7)",
                "uniform(bits=16, block=None)", "uniform(bits=11, block=1)", "uniform(bits=8, symmetric=True)",
                "uniform(bits=2, symmetric=True, stochastic=True)", "uniform(bits=4, stochastic=True)",
                "uniform(bits=5, block=64, stochastic=True)"),
    "log": ("log(bits=8)", "log(bits=2, block=None)", "log(bits=12, delta=1e-05, block=7)", "log(bits=5, delta=1)"),
    "qsgd": ("qsgd(levels=127)", "qsgd(levels=1, block=None)", "qsgd(levels=7, block=16)"),
    "ternary": ("ternary", "ternary(block=None)", "ternary(block=7)"),
    "sign": ("sign", "sign(block=None)", "sign(block=5)"),
    "natural": ("natural",),
    "vq": ("vq(dim=4, codewords=16)", "vq(dim=1, codewords=8, block=None)", "vq(dim=8, codewords=64, block=24)",
           "vq(dim=2, codewords=16, codebook='learned', refresh=3)"),
    "topk": ("topk(ratio=0.01)", "topk(ratio=0.3)", "topk(ratio=1)", "topk(ratio=0.1, index='plain')",
             "topk(ratio=0.05, threshold='sampled')", "topk(ratio=0.05, threshold='statistical')"),
    "randomk": ("randomk(ratio=0.1)", "randomk(ratio=0.3, shared=False)", "randomk(ratio=1)"),
    "blocktopk": ("blocktopk(ratio=0.1)", "blocktopk(ratio=0.3, block=4)", "blocktopk(ratio=0.2, axis=0)"),
    "svd": ("svd(rank=1)", "svd(rank=4)"),
    "powersgd": ("powersgd(rank=1)", "powersgd(rank=4)", "powersgd(rank=2, iterations=2)",
                 "powersgd(rank=1, alternate=False)", "powersgd(rank=2, iterations=2, alternate=False)"),
    "tt": ("tt(rank=1)", "tt(rank=3)"),
    "tr": ("tr(rank=1)", "tr(rank=3)"),
    "+": ("topk(ratio=0.1) + uniform(bits=8)", "topk(ratio=0.2) + fp16", "topk(ratio=0.2) + bf16",
          "topk(ratio=0.2) + sign", "topk(ratio=0.1) + uniform(bits=4, stochastic=True)", "topk(ratio=0.1) + none",
          "topk(ratio=0.5) + topk(ratio=0.5) + uniform(bits=6)", "randomk(ratio=0.2) + fp16",
          "blocktopk(ratio=0.2, block=4) + log(bits=6)", "powersgd(rank=2) + fp16",
          "powersgd(rank=1, alternate=False) + uniform(bits=8)", "svd(rank=2) + bf16"),
}
"""Codec name (``+`` for chains) to the spec strings that are tested."""

ALL: tuple[str, ...] = tuple(spec for specs in SPECS.values() for spec in specs)

INEXACT_FAMILIES = frozenset({"low rank"})
"""Families that agree between frameworks to a tolerance; the bytes of all others are the same everywhere."""


def exact(codec: Codec) -> bool:
    """Whether the payload's bytes are the same in every framework."""
    if isinstance(codec, Chain):
        return all(exact(each) for each in codec.codecs)
    return codec.family not in INEXACT_FAMILIES


EXACT: tuple[str, ...] = tuple(spec for spec in ALL if exact(parse(spec)))

COMPRESSING: tuple[str, ...] = tuple(spec for spec in ALL if not parse(spec).lossless)
"""Those that keep a residual."""

ENDS: tuple[str, ...] = tuple(dict.fromkeys(spec for specs in SPECS.values() for spec in (specs[0], specs[-1])))
"""Two of each codec, for what takes long."""

LAST: tuple[str, ...] = tuple(specs[-1] for specs in SPECS.values())
"""One of each codec, for what takes longest: put the most demanding one last."""

CARRIED: tuple[tuple[str, str], ...] = tuple(
    (spec, name) for spec in ALL for name, exchange in EXCHANGES.items()
    if exchange.allows(parse(spec)) is None and (spec in ENDS or name not in ("two_stage", "sum")))
"""Every spec with every exchange that can carry it; two of each codec with ``two_stage``, which carries all, and with
``sum``, for which scalar codecs turn into one."""

CHUNKED: tuple[tuple[str, str], ...] = tuple(
    (spec, name) for spec, name in CARRIED if name in ("two_stage", "sparse_split") and spec in LAST)
"""One of each codec with the exchanges that cut tensors in chunks."""


def claiming(claim: str) -> tuple[str, ...]:
    """The specs whose codec makes a claim of :class:`hvd_gradcomp.codecs.base.Claims`."""
    return tuple(spec for spec in ALL if getattr(parse(spec).claims, claim))
