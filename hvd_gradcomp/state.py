"""Saving and restoring what a Compression keeps between steps on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvd_gradcomp.errors import StateError
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.plan import Plan, differences
from hvd_gradcomp.version import __version__

FORMAT = 1


def save(plan: Plan, rank: int, ranks: int, copy: Callable[[Array], Array]) -> dict[str, Any]:
    """This rank's state as plain values and arrays: for one file per rank.

    Args:
        copy: an independent copy of a state array, in the form that is to be saved.
    """
    tensors = {name: {key: copy(array) for key, array in slot.state.items()}
               for name, slot in plan.slots.items() if slot.state}
    return {"format": FORMAT, "version": __version__, "rank": rank, "ranks": ranks, "plan": plan.describe(),
            "tensors": tensors}


def restore(state: Mapping[str, Any], plan: Plan, rank: int, ranks: int,
            store: Callable[[Array, Array], None]) -> None:
    """Put saved state back; checks everything first, so an error changes nothing.

    Args:
        store: ``store(target, saved)`` writes one array.

    Raises:
        StateError: another format, rank, world size, plan, or shape.
    """
    try:
        version, saved_rank, saved_ranks = state["format"], state["rank"], state["ranks"]
        saved_plan, tensors = state["plan"], state["tensors"]
    except (KeyError, TypeError):
        raise StateError("this is not what Compression.state_dict() returned") from None
    if version != FORMAT:
        raise StateError(f"state of format {version}; this version reads format {FORMAT}")
    if (saved_rank, saved_ranks) != (rank, ranks):
        raise StateError(f"state of rank {saved_rank} of {saved_ranks}, but this is rank {rank} of {ranks}: residuals "
                         "differ by rank, so each rank saves and loads its own (with another number of ranks, start "
                         "with empty residuals: do not load)")
    mine = plan.describe()
    theirs = [{**saved_plan[0], "version": mine[0]["version"]}, *map(list, saved_plan[1:])]
    difference = differences([mine, theirs])
    if difference:
        raise StateError(f"the state was saved with another configuration: {difference[0].partition(': ')[2]}")
    for name, slot in plan.slots.items():
        saved = tensors.get(name, {})
        if saved.keys() != slot.state.keys():
            raise StateError(f"tensor {name!r}: saved {sorted(saved)}, expected {sorted(slot.state)}")
        for key, array in slot.state.items():
            if tuple(saved[key].shape) != tuple(array.shape):
                raise StateError(f"{key} of tensor {name!r} has shape {tuple(saved[key].shape)}, "
                                 f"not {tuple(array.shape)}")
    for name, slot in plan.slots.items():
        for key, array in slot.state.items():
            store(array, tensors[name][key])
