"""Ranks have left or joined a running job (Horovod elastic): what is kept goes over to those that are there now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp import state
from hvd_gradcomp.collectives.hvd_torch import hvd
from hvd_gradcomp.exchange.two_stage import OWNER, bounds
from hvd_gradcomp.memory.error_feedback import STATE as RESIDUAL
from hvd_gradcomp.plan import Plan


def spread(old: Plan, new: Plan, places: Sequence[tuple[int, int]], process_set: Any) -> None:
    """Give every rank the same share of the residuals, and the shared state of those that had it.

    A residual ``r`` of one in ``n`` ranks counts ``r / n`` in the mean gradient. Every rank gets the
    sum of ``r / n`` over the ranks that are left, so that counts as much as before; what a dead rank
    kept is lost. The rules are those of :func:`hvd_gradcomp.state.resized`.

    Args:
        old: the plan until now, with this rank's state.
        new: the one from now on, with all state arrays; they are overwritten.
        places: for each rank now in the set, its ``(rank, ranks)`` until now; ``ranks`` is 0 for a new one.
    """
    rank, ranks = places[process_set.rank()]
    first = next(i for i, (_, n) in enumerate(places) if n)
    before = new.for_ranks(places[first][1])
    for name, slot in new.slots.items():
        had = before.slots[name].state_layout(new.error_feedback, before.ranks, new.dgc)
        layout = slot.state_layout(new.error_feedback, new.ranks, new.dgc)
        kept = old.slots[name].state if ranks else {}
        for key, array in slot.state.items():
            label = f"gradcomp.spread.{name}.{key}"
            if state.kind(new, slot, key) == state.SHARED:
                array.copy_(hvd.broadcast(kept.get(key, array), process_set.ranks[first], name=label,
                                          process_set=process_set) if had.get(key) == layout[key] else 0)
            elif key == OWNER:
                array.zero_()
            else:
                mine = torch.zeros_like(array, dtype=torch.float64)
                if ranks:
                    mine += kept[key].double() / ranks
                if key == RESIDUAL and OWNER in kept:
                    begin, end = bounds(slot.spec.numel, ranks)[rank]
                    mine[begin:end] += kept[OWNER][: end - begin]
                array.copy_(hvd.allreduce(mine, op=hvd.Sum, name=label, process_set=process_set))
