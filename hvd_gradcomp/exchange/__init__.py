"""Exchange strategies, and which one ``auto`` takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.exchange.base import Exchange
from hvd_gradcomp.exchange.gather import Gather
from hvd_gradcomp.exchange.hierarchical import Hierarchical
from hvd_gradcomp.exchange.sparse_split import SparseSplit
from hvd_gradcomp.exchange.sum import Sum
from hvd_gradcomp.exchange.two_stage import TwoStage
from hvd_gradcomp.spec import TensorSpec

EXCHANGES: dict[str, Exchange] = {exchange.name: exchange for exchange in (
    Sum(), Gather(), TwoStage(), SparseSplit())}

ROUND = 1 << 16
"""Bytes that must be saved for one round more: about what 1 Gbit/s carries while a round starts."""

WORK = 0.25
"""And for each element, where ``sparse_split`` looks at it: about what 100 Mbit/s carries while it works on one core
(docs/exchange.md: 16 ms for 1,048,576 elements more than ``gather`` on 2 ranks)."""

HIERARCHICAL = "hierarchical"
_WITH_HOSTS = re.compile(rf"{HIERARCHICAL}\(local=(\d+)\)")


def choose(codec: Codec, spec: TensorSpec, ranks: int, requested: str = "auto") -> Exchange:
    """The exchange for a tensor: ``auto`` sums what may be summed (its cost does not grow with the number
    of ranks) and gathers the rest, unless ``sparse_split`` (of entries) or ``two_stage`` saves so many bytes that it is
    worth its further round and its work.
    A codec of the tensor's shape is not cut in chunks unasked.

    ``hierarchical(local=L)``: hosts of L ranks, between which ``auto`` chooses. Where there is one host, or one
    rank on each, it is ``auto``.

    Raises SpecError for an exchange that cannot carry the codec, or number of ranks."""
    if requested == "auto":
        if codec.summable_rounds:
            return EXCHANGES["sum"]
        scales = EXCHANGES["sparse_split" if codec.sparse else "two_stage"]
        gather = EXCHANGES["gather"]
        costs = ROUND + (WORK * spec.numel if codec.sparse else 0)
        if codec.shaped or gather.received(codec, spec, ranks) - scales.received(codec, spec, ranks) < costs:
            return gather
        return scales
    hosts = _WITH_HOSTS.fullmatch(requested)
    if hosts:
        return _hierarchical(codec, spec, ranks, int(hosts[1]))
    if requested == HIERARCHICAL:
        raise SpecError("exchange='hierarchical': say how many ranks a host has, as in 'hierarchical(local=4)'")
    if requested not in EXCHANGES:
        raise SpecError(f"there is no exchange {requested!r}: 'auto', {', '.join(map(repr, EXCHANGES))}, "
                        f"'{HIERARCHICAL}', '{HIERARCHICAL}(local=4)'")
    return _allowed(EXCHANGES[requested], codec, requested)


def with_hosts(exchange: str | Mapping[str, str], local: Callable[[], int]) -> str | dict[str, str]:
    """``exchange`` with the number of ranks on a host, which ``local`` finds out, wherever it was left out."""
    def one(name: str) -> str:
        return f"{HIERARCHICAL}(local={local()})" if name == HIERARCHICAL else name

    return one(exchange) if isinstance(exchange, str) else {pattern: one(name) for pattern, name in exchange.items()}


def _hierarchical(codec: Codec, spec: TensorSpec, ranks: int, local: int) -> Exchange:
    if local < 2 or ranks <= local:
        return choose(codec, spec, ranks)
    requested = f"{HIERARCHICAL}(local={local})"
    if ranks % local:
        raise SpecError(f"exchange={requested!r}: {ranks} ranks are no hosts of {local} each")
    between = choose(codec, TensorSpec(spec.name, (-(-spec.numel // local),)), ranks // local)
    if isinstance(between, TwoStage):
        between = TwoStage(owner_memory=False)  # the residual of the whole is enough
    return _allowed(Hierarchical(local, between), codec, requested)


def _allowed(exchange: Exchange, codec: Codec, requested: str) -> Exchange:
    reason = exchange.allows(codec)
    if reason is not None:
        raise SpecError(f"exchange={requested!r}: {reason}; use exchange='auto'")
    return exchange
