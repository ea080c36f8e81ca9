"""Exchange strategies, and which one ``auto`` takes."""

from __future__ import annotations

from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.exchange.base import Exchange
from hvd_gradcomp.exchange.gather import Gather
from hvd_gradcomp.exchange.sum import Sum

EXCHANGES: dict[str, Exchange] = {exchange.name: exchange for exchange in (Sum(), Gather())}


def choose(codec: Codec, requested: str = "auto") -> Exchange:
    """The exchange for a codec: ``auto`` sums what may be summed (its cost does not grow with the
    number of ranks) and gathers the rest. Raises SpecError for one that cannot carry the codec."""
    if requested == "auto":
        return EXCHANGES["sum" if codec.summable_rounds else "gather"]
    if requested not in EXCHANGES:
        raise SpecError(f"there is no exchange {requested!r}: 'auto', {', '.join(map(repr, EXCHANGES))}")
    reason = EXCHANGES[requested].allows(codec)
    if reason is not None:
        raise SpecError(f"exchange={requested!r}: {reason}; use exchange='auto'")
    return EXCHANGES[requested]
