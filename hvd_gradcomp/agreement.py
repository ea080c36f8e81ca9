"""Ranks compare what they were given before the first exchange: a difference is an error, not a hang."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from zlib import crc32

from hvd_gradcomp.errors import DisagreementError
from hvd_gradcomp.plan import Plan, differences

_agreed: Counter[int] = Counter()


def new_name(ranks: Sequence[int]) -> str:
    """A name that the ranks of a process set have in common, new for each call.

    The set is known by its ranks: Horovod gives the number of a removed set to another one, which
    would then count differently on different ranks. It counts calls, so ranks must use their
    Compressions for the first time in the same order; where they do not, the comparison that travels
    under this name says so.
    """
    number = crc32(repr(list(ranks)).encode())
    _agreed[number] += 1
    return f"gradcomp.{number:08x}.{_agreed[number] - 1}"


def forget() -> None:
    """Count from the start again, on all ranks at once: ranks that joined late have not counted."""
    _agreed.clear()


def check(plan: Plan, gather: Callable[[bytes], list[bytes]]) -> None:
    """Raise DisagreementError on every rank, naming the rank and the difference, if plans differ.

    Args:
        gather: everyone's bytes in rank order (they may differ in length). Called once if all
            agree, with 16 bytes; twice if they do not.
    """
    digests = gather(plan.digest())
    if len(set(digests)) == 1:
        return
    descriptions = [json.loads(text) for text in gather(json.dumps(plan.describe()).encode())]
    lines = "\n  ".join(differences(descriptions))
    raise DisagreementError(f"the ranks were given different compressions; make them alike:\n  {lines}")
