"""The token: what Horovod reduces in place of a compressed gradient under its stock optimizers.

Horovod applies its op (Average, Sum) and its pre- and postscale factors to whatever ``compress``
returns. A small token returns with exactly these factors, so every codec honours them without
knowing them, and two more elements show whether Horovod and the Compression reduce over the same
process set.

Elements: 1; 1 on the lowest rank of the Compression's process set, else 0; the bits of that lowest
rank. If every bit comes back as this rank's own, all ranks that Horovod reduces over are in sets
with the same lowest rank, so in one set; if the second comes back as one in ``len(ranks)``, that set
is no larger and no smaller than Horovod's.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvd_gradcomp.errors import ProcessSetError

SNAP = 1e-6
"""Relative rounding up to which a factor is taken for a whole number."""


def values(ranks: Sequence[int], rank: int, size: int) -> list[float]:
    """The token of global rank ``rank`` of ``size`` for a Compression over the global ranks ``ranks``.

    A rank outside of them counts as two lowest ones: no mean that it takes part in is as expected.
    """
    second = 2.0 if rank not in ranks else 1.0 if rank == min(ranks) else 0.0
    return [1.0, second, *_bits(min(ranks), size)]


def _bits(number: int, size: int) -> list[float]:
    return [float(number >> i & 1) for i in range((size - 1).bit_length())]


def factor(reduced: float) -> float:
    """What the mean over ranks is to be multiplied by, from the reduced first element.

    Snapped to a whole number within rounding: in float32 N * (1/N) is not 1 for N = 41, 47, 55.
    """
    nearest = round(reduced)
    return float(nearest) if abs(reduced - nearest) <= SNAP * max(1.0, abs(reduced)) else reduced


def expected(ranks: Sequence[int], size: int) -> list[float]:
    """The reduced token divided by its first element, if both sides use the same process set."""
    return [1.0, 1.0 / len(ranks), *_bits(min(ranks), size)]


def tolerance(size: int) -> float:
    """How far an element may be from :func:`expected`: less than half of what one differing rank
    would change, and no more than rounding needs, so that an op that is no mean (Adasum) shows too."""
    return min(1e-3, 0.5 / size**2)


def mismatch(ranks: Sequence[int]) -> str:
    """The message of the error."""
    return ("Horovod and the Compression reduce over different process sets; the Compression was given ranks "
            f"{list(ranks)}. Pass the same process_set= to Horovod's optimizer or tape and to the Compression")


def check(reduced: Sequence[float], ranks: Sequence[int], size: int) -> None:
    """Raise ProcessSetError unless the reduced token shows the same process set on both sides."""
    for element, want in zip(reduced, expected(ranks, size), strict=True):
        if abs(element - reduced[0] * want) > tolerance(size) * abs(reduced[0]):
            raise ProcessSetError(mismatch(ranks))
