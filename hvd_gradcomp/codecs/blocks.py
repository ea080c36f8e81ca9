"""A vector as rows of one block each; padding that shows in no result."""

from __future__ import annotations

import math

from hvd_gradcomp.ops.base import Array, Ops


def count(n: int, block: int | None) -> int:
    """Number of blocks of a vector of ``n`` elements; one if ``block`` is None."""
    return 1 if block is None else math.ceil(n / block)


def rows(ops: Ops, x: Array, block: int | None, edge: bool) -> Array:
    """``[blocks, block]``. The last row is filled with its last value (``edge``: changes no
    minimum or maximum) or with zeros (changes no sum)."""
    n = int(x.shape[0])
    blocks = count(n, block)
    width = n if block is None else block
    return ops.reshape(ops.pad(x, blocks * width, edge), (blocks, width))


def spread(ops: Ops, per_block: Array, n: int, block: int | None) -> Array:
    """Per-block values ``[blocks]`` as a column ``[blocks, 1]`` that broadcasts over :func:`rows`."""
    return ops.reshape(per_block, (count(n, block), 1))


def flat(ops: Ops, x: Array, n: int) -> Array:
    """The first ``n`` elements of ``[blocks, block]``: the vector without its padding."""
    return ops.reshape(x, (int(x.shape[0]) * int(x.shape[1]),))[:n]
