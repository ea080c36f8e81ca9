"""Exchange strategies, and which one ``auto`` takes."""

from __future__ import annotations

from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.exchange.base import Exchange
from hvd_gradcomp.exchange.gather import Gather
from hvd_gradcomp.exchange.sparse_split import SparseSplit
from hvd_gradcomp.exchange.sum import Sum
from hvd_gradcomp.exchange.two_stage import TwoStage
from hvd_gradcomp.spec import TensorSpec

EXCHANGES: dict[str, Exchange] = {exchange.name: exchange for exchange in (
    Sum(), Gather(), TwoStage(), SparseSplit())}

ROUND = 1 << 16
"""Bytes that must be saved for one round more: about what 1 Gbit/s carries while a round starts."""


def choose(codec: Codec, spec: TensorSpec, ranks: int, requested: str = "auto") -> Exchange:
    """The exchange for a tensor: ``auto`` sums what may be summed (its cost does not grow with the number
    of ranks) and gathers the rest, unless ``sparse_split`` (of entries) or ``two_stage`` saves enough.
    A codec of the tensor's shape is not cut in chunks unasked. Raises SpecError for an exchange that
    cannot carry the codec."""
    if requested == "auto":
        if codec.summable_rounds:
            return EXCHANGES["sum"]
        scales = EXCHANGES["sparse_split" if codec.sparse else "two_stage"]
        gather = EXCHANGES["gather"]
        if codec.shaped or gather.received(codec, spec, ranks) - scales.received(codec, spec, ranks) < ROUND:
            return gather
        return scales
    if requested not in EXCHANGES:
        raise SpecError(f"there is no exchange {requested!r}: 'auto', {', '.join(map(repr, EXCHANGES))}")
    reason = EXCHANGES[requested].allows(codec)
    if reason is not None:
        raise SpecError(f"exchange={requested!r}: {reason}; use exchange='auto'")
    return EXCHANGES[requested]
