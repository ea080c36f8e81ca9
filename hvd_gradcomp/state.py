"""What a Compression keeps between steps on this rank, as plain values and arrays: saved, restored, resized.

Two kinds of arrays. *Per rank*: what the memory keeps (residuals, momenta) and an owner's residual
under ``two_stage``, which differ by rank on purpose. *Shared*: the step count and what codecs learn
(PowerSGD's factor, codebooks), the same on every rank.

In a world of another size every rank starts with the mean over the old ranks of each per-rank array,
to which the owners' residuals are added, so nothing is lost; shared arrays are taken over, but for what
was learned of chunks that are cut in another way now. Where ranks left or joined a running job
(:func:`spread`) the same holds of the ranks that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_gradcomp.errors import StateError
from hvd_gradcomp.exchange.two_stage import OWNER, bounds
from hvd_gradcomp.memory.error_feedback import STATE as RESIDUAL
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.plan import Plan, Slot, differences
from hvd_gradcomp.version import __version__

FORMAT = 2
TENSORS, PER_RANK, SHARED = "tensors", "per_rank", "shared"
Saved = Mapping[str, Any]
"""What :func:`save` returns."""


def save(plan: Plan, rank: int, ranks: int, copy: Callable[[Array], Array]) -> dict[str, Any]:
    """This rank's state: ``format``, ``version``, ``rank``, ``ranks``, ``plan``; the arrays by tensor and name under
    ``tensors``; and under ``per_rank`` the names, by tensor, of those that differ by rank.

    Args:
        copy: an independent copy of a state array, in the form that is to be saved.
    """
    filled = {name: slot for name, slot in plan.slots.items() if slot.state}
    return {"format": FORMAT, "version": __version__, "rank": rank, "ranks": ranks, "plan": plan.describe(),
            PER_RANK: {name: _per_rank(plan, slot, slot.state) for name, slot in filled.items()},
            TENSORS: {name: {key: copy(array) for key, array in slot.state.items()} for name, slot in filled.items()}}


def check(state: Saved, plan: Plan, rank: int, ranks: int) -> None:
    """Raise StateError if ``state`` is not of this rank, world size, plan, or has other arrays."""
    _check_format(state)
    if (state["rank"], state["ranks"]) != (rank, ranks):
        raise StateError(f"state of rank {state['rank']} of {state['ranks']}, but this is rank {rank} of {ranks}: "
                         "residuals differ by rank, so each rank saves and loads its own (for another number of ranks: "
                         "hvd_gradcomp.checkpoint, or state.resized)")
    _check_plan(plan.describe(), state["plan"])
    for name, slot in plan.slots.items():
        found = {key: _form(array) for key, array in state[TENSORS].get(name, {}).items()}
        wanted = {key: _form(array) for key, array in slot.state.items()}
        if found.keys() != wanted.keys():
            raise StateError(f"tensor {name!r}: saved {sorted(found)}, expected {sorted(wanted)}")
        for key, form in wanted.items():
            if found[key] != form:
                raise StateError(f"{key} of tensor {name!r} is {found[key]}, not {form}")


def restore(state: Saved, plan: Plan, rank: int, ranks: int, store: Callable[[Array, Array], None]) -> None:
    """Put saved state back; checks everything first, so an error changes nothing.

    Args:
        store: ``store(target, saved)`` writes one array.

    Raises:
        StateError: see :func:`check`.
    """
    check(state, plan, rank, ranks)
    put(state, plan, store)


def put(state: Saved, plan: Plan, store: Callable[[Array, Array], None]) -> None:
    """Write arrays that were checked."""
    for name, slot in plan.slots.items():
        for key, array in slot.state.items():
            store(array, state[TENSORS][name][key])


def resized(states: Iterable[Saved], plan: Plan, rank: int) -> dict[str, Any]:
    """The state with which a rank goes on in a world of ``plan.ranks``, as numpy arrays.

    Args:
        states: of *all* ranks that saved together, in any order; read one after the other.

    Raises:
        StateError: a rank is missing or there twice, they do not belong together, or not to the plan.
    """
    first: Saved | None = None
    seen: list[int] = []
    kept: dict[tuple[str, str], Any] = {}  # float64
    for state in states:
        _check_format(state)
        if first is None:
            first = state
            _check_plan(plan.describe(), state["plan"], exchanges=False)
        if state["ranks"] != first["ranks"]:
            raise StateError(f"states of {first['ranks']} and of {state['ranks']} ranks do not belong together")
        _check_plan(first["plan"], state["plan"])
        seen.append(state["rank"])
        for name, slot in plan.slots.items():
            own = {key: as_numpy(state[TENSORS][name][key]) for key in state[PER_RANK].get(name, ())}
            for key in own.keys() - {OWNER}:
                total = kept.setdefault((name, key), np.zeros(slot.spec.numel))
                total += own[key].astype(np.float64) / state["ranks"]
            if OWNER in own:
                begin, end = bounds(slot.spec.numel, state["ranks"])[state["rank"]]
                kept[name, RESIDUAL][begin:end] += own[OWNER][: end - begin]
    if first is None:
        raise StateError("there is no state to load")
    missing = sorted(set(range(first["ranks"])) - set(seen))
    if missing or len(seen) != first["ranks"]:
        raise StateError(f"state of {first['ranks']} ranks: " + (f"that of rank {missing[0]} is missing" if missing
                         else f"got those of ranks {sorted(seen)}"))
    tensors: dict[str, dict[str, Array]] = {}
    for name, slot in plan.slots.items():
        for key, (length, dtype) in slot.state_layout(plan.error_feedback, plan.ranks, plan.dgc).items():
            if (name, key) in kept:
                array = kept[name, key].astype(np.float32)
            else:
                array = as_numpy(first[TENSORS].get(name, {}).get(key, np.zeros(length, dtype))).copy()
            fits = key != OWNER and array.shape == (length,)  # what was learned of a chunk of another length does not
            tensors.setdefault(name, {})[key] = array if fits else np.zeros(length, dtype)
    per_rank = {name: _per_rank(plan, plan.slots[name], arrays) for name, arrays in tensors.items()}
    return {**first, "rank": rank, "ranks": plan.ranks, "plan": plan.describe(), PER_RANK: per_rank, TENSORS: tensors}


def spread(old: Plan, new: Plan, places: Sequence[tuple[int, int]], rank: int, *,
           broadcast: Callable[[Any, int, str], Any], add: Callable[[Any, str], Any],
           store: Callable[[Array, Any], None]) -> None:
    """Give every rank of a changed world the same share of the residuals, and the shared state of those that had it.

    A residual ``r`` of one in ``n`` ranks counts ``r / n`` in the mean gradient. Every rank gets the
    sum of ``r / n`` over the ranks that are left, so that counts as much as before; what a dead rank
    kept is lost. Called on every rank at once.

    Args:
        old: the plan until now, with this rank's state.
        new: the one from now on, with all state arrays; they are overwritten.
        places: for each rank of the new world, its ``(rank, ranks)`` until now; ``ranks`` is 0 for a new one.
        rank: this one's in the new world.
        broadcast: ``broadcast(array, root, name)`` gives everyone the new world's rank ``root``'s numpy array.
        add: ``add(array, name)`` gives the sum over the ranks of a float64 numpy array.
        store: ``store(target, array)`` writes a numpy array into a state array.
    """
    own, ranks = places[rank]
    first = next(i for i, (_, n) in enumerate(places) if n)
    before = new.for_ranks(places[first][1])
    for name, slot in new.slots.items():
        had = before.slots[name].state_layout(new.error_feedback, before.ranks, new.dgc)
        kept = {key: as_numpy(array).copy() for key, array in old.slots[name].state.items()} if ranks else {}
        for key, (length, dtype) in slot.state_layout(new.error_feedback, new.ranks, new.dgc).items():
            label = f"gradcomp.spread.{name}.{key}"
            value = np.zeros(length, dtype)
            if kind(new, slot, key) == SHARED:
                if had.get(key) == (length, dtype):
                    value = broadcast(kept.get(key, value), first, label)
            elif key != OWNER:
                mine = kept[key].astype(np.float64) / ranks if ranks else np.zeros(length)
                if key == RESIDUAL and OWNER in kept:
                    begin, end = bounds(slot.spec.numel, ranks)[own]
                    mine[begin:end] += kept[OWNER][: end - begin]
                value = add(mine, label).astype(dtype)
            store(slot.state[key], value)


def as_numpy(array: Array) -> Any:
    """A saved array of any framework as a numpy array."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def kind(plan: Plan, slot: Slot, key: str) -> str:
    """Whether a state array is ``per_rank`` or ``shared``."""
    learned = {name for stage in slot.stages
               for name in stage.exchange.state(stage.codec, slot.spec, plan.ranks, memory=False)}
    return SHARED if key == "step" or key in learned else PER_RANK


def _per_rank(plan: Plan, slot: Slot, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if kind(plan, slot, key) == PER_RANK]


def _check_format(state: Saved) -> None:
    if not isinstance(state, Mapping) or "format" not in state or "plan" not in state:
        raise StateError("this is not what Compression.state_dict() returned")
    if state["format"] != FORMAT:
        raise StateError(f"state of format {state['format']}; this version reads format {FORMAT}")
    missing = {"rank", "ranks", PER_RANK, TENSORS} - state.keys()
    if missing:
        raise StateError(f"this is not what Compression.state_dict() returned: {', '.join(sorted(missing))} missing")


def _check_plan(mine: list[Any], saved: list[Any], exchanges: bool = True) -> None:
    # What travels beside the values changes nothing of what is kept.
    alike = {key: mine[0][key] for key in ("version", "verify")}
    theirs = [{**saved[0], **alike}, *map(list, saved[1:])]
    if not exchanges:
        mine, theirs = _without_exchanges(mine), _without_exchanges(theirs)
    difference = differences([mine, theirs])
    if difference:
        raise StateError(f"the state was saved with another configuration: {difference[0].partition(': ')[2]}")


def _without_exchanges(plan: list[Any]) -> list[Any]:
    """Which one is taken depends on the number of ranks."""
    return plan[:1] + [[*row[:4], "", *row[5:]] for row in plan[1:]]


def _form(array: Array) -> str:
    dtype = str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")
    return f"{dtype}{list(array.shape)}"
