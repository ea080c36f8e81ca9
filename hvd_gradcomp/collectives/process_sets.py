"""Horovod's process sets for exchanges in which groups of ranks combine among themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.exchange.base import Exchange

Sets = Mapping[tuple[int, ...] | None, Any]
"""``Send.group`` to the process set that it stands for."""


def host_process_sets(local: int | None = None, ranks: int | None = None) -> list[Any]:
    """What ``exchange="hierarchical"`` combines over, to be made by ``hvd.init(process_sets=...)``. Not needed
    under ``HOROVOD_DYNAMIC_PROCESS_SETS=1``.

    Args:
        local: ranks on each host; by default what the launcher says.
        ranks: number of all ranks; by default what the launcher says.

    Raises:
        UsageError: ``ranks`` are no hosts of ``local`` each, or there is no launcher and nothing was said.
    """
    from horovod.common.process_sets import ProcessSet

    ranks = _launched("SIZE") if ranks is None else ranks
    local = _launched("LOCAL_SIZE") if local is None else local
    if local < 1 or ranks % local:
        raise UsageError(f"{ranks} ranks are no hosts of {local} each")
    if local == 1 or ranks == local:
        return []
    return [ProcessSet([*range(first, first + local)]) for first in range(0, ranks, local)] + [
        ProcessSet([*range(place, ranks, local)]) for place in range(local)]


def local_size(hvd: Any, process_set: Any) -> int:
    """How many ranks of a process set each host has. Raises UsageError if that differs, or if the ranks of a host
    are not neighbors, as Horovod's launcher places them."""
    if not hvd.is_initialized() or not process_set.included():
        return 1
    even = hvd.cross_size() * hvd.local_size() == hvd.size()
    if not even or hvd.rank() != hvd.cross_rank() * hvd.local_size() + hvd.local_rank():
        raise UsageError("exchange='hierarchical': hosts must have equally many ranks, one host's after the other's")
    hosts = [rank // hvd.local_size() for rank in process_set.ranks]
    counts = {hosts.count(host) for host in hosts}
    if len(counts) > 1:
        raise UsageError(f"exchange='hierarchical': the ranks {process_set.ranks} of the process set are unevenly many "
                         "on each host")
    return counts.pop()


def connect(hvd: Any, process_set: Any, exchanges: Iterable[Exchange]) -> Sets:
    """The process sets of all groups that the exchanges combine over; those that are missing are made, by all
    ranks together.

    Raises:
        UsageError: on every rank, if they are missing and cannot be made now; it says what can be done.
    """
    sets: dict[tuple[int, ...] | None, Any] = {None: process_set}
    groups = [group for exchange in exchanges for group in exchange.groups(process_set.size())]
    if not groups:
        return sets
    known = _known()
    for group in groups:
        if group in sets:
            continue
        ranks = [process_set.ranks[i] for i in group]
        sets[group] = known.get(tuple(ranks)) or _add(hvd, process_set, ranks)
    return sets


def _add(hvd: Any, process_set: Any, ranks: Sequence[int]) -> Any:
    try:
        if process_set.size() < hvd.size():
            raise ValueError("not all ranks are here to make them")
        return hvd.add_process_set(list(ranks))
    except ValueError as error:
        raise UsageError(
            "exchange='hierarchical' combines over process sets of its own, which are missing. Either start Horovod by "
            "hvd.init(process_sets=hvd_gradcomp.torch.host_process_sets()) (or hvd_gradcomp.tensorflow...), or, for a "
            f"Compression over all ranks, set HOROVOD_DYNAMIC_PROCESS_SETS=1 ({error})") from None


def _known() -> dict[tuple[int, ...], Any]:
    """The process sets that Horovod has now. It has no public way to list them."""
    from horovod.common import process_sets

    found = {}
    for number, ranks in process_sets._basics._get_process_set_ids_and_ranks().items():
        found[tuple(ranks)] = each = process_sets.ProcessSet(ranks)
        each.process_set_id = number
    return found


def _launched(what: str) -> int:
    for name in (f"HOROVOD_{what}", f"OMPI_COMM_WORLD_{what}"):
        if name in os.environ:
            return int(os.environ[name])
    raise UsageError("not started by horovodrun: say how many ranks there are, and how many on each host, "
                     "host_process_sets(local=..., ranks=...)")
