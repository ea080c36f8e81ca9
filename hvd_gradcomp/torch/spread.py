"""Ranks have left or joined a running job (Horovod elastic): what is kept goes over to those that are there now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp import state
from hvd_gradcomp.collectives.hvd_torch import hvd
from hvd_gradcomp.plan import Plan


def spread(plan: Plan, before: Sequence[int], process_set: Any) -> None:
    """Give every rank the same share of the residuals, and the shared state of those that had it.

    A residual ``r`` of one in ``n`` ranks counts ``r / n`` in the mean gradient. Every rank gets the
    sum of ``r / n`` over the ranks that are left, so that counts as much as before; what a dead rank
    kept is lost.

    Args:
        plan: with all state arrays; they are overwritten.
        before: for each rank now in the set, how many ranks it reduced with until now; 0 for a new one.
    """
    rank = process_set.rank()
    source = process_set.ranks[next(i for i, n in enumerate(before) if n)]
    for name, slot in plan.slots.items():
        for key, array in slot.state.items():
            label = f"gradcomp.spread.{name}.{key}"
            if state.kind(slot, key) == state.SHARED:
                array.copy_(hvd.broadcast(array, source, name=label, process_set=process_set))
            else:
                mine = array.double() / before[rank] if before[rank] else torch.zeros_like(array, dtype=torch.float64)
                array.copy_(hvd.allreduce(mine, op=hvd.Sum, name=label, process_set=process_set))
