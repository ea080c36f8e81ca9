"""MPI's non-blocking collectives on numpy arrays as a transport: no Horovod, no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.exchange.base import Commit, Exchange, Flow, Send
from hvd_gradcomp.ops.base import Array

Comms = Mapping[tuple[int, ...] | None, MPI.Intracomm]
"""``Send.group`` to the communicator that it stands for."""


def gather_bytes(data: bytes, comm: MPI.Comm) -> list[bytes]:
    """Everyone's bytes in rank order. Waits."""
    return comm.allgather(data)


def connect(comm: MPI.Intracomm, exchanges: Iterable[Exchange]) -> Comms:
    """Communicators of their own for one tensor: of all ranks, and of the groups of this rank that the exchanges
    combine over. Collective."""
    comms: dict[tuple[int, ...] | None, MPI.Intracomm] = {None: comm.Dup()}
    for group in dict.fromkeys(group for exchange in exchanges for group in exchange.groups(comm.size)):
        members = comm.group.Incl(group)
        made = comm.Create(members)
        members.Free()
        if isinstance(made, MPI.Intracomm) and made != MPI.COMM_NULL:
            comms[group] = made
    return comms


def local_size(comm: MPI.Intracomm) -> int:
    """How many ranks of a communicator each host has. Collective. Raises UsageError, on every rank, if that differs,
    or if the ranks of a host are not neighbors."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    local = host.size
    placed = comm.allgather((local, comm.rank == comm.rank // local * local + host.rank))
    host.Free()
    if placed != [(local, True)] * comm.size:
        raise UsageError("exchange='hierarchical': hosts must have equally many ranks, one host's after the other's")
    return int(local)


class OpenExchange:
    """One tensor's flow on a communicator of its own, so that it is in step with its peers whatever
    else is open. Nothing here waits.

    Args:
        comms: the communicator of each group that it combines over; that of all ranks under None.
        verdict: this rank's part of the step's verdict; the smallest of all ranks decides.
    """

    def __init__(self, flow: Flow, comms: Comms, verdict: float) -> None:
        self.verdict = np.array([verdict], np.float32)
        """The smallest of all ranks, once the exchange is done."""
        self.result: Array = None
        self.done = False
        self._flow, self._comms = flow, comms
        self._flag = comms[None].Iallreduce(MPI.IN_PLACE, self.verdict, MPI.MIN)
        self._requests: list[MPI.Request] = []
        self._buffers: list[Array] = []  # of the running collectives: MPI needs them until they are done
        self._results: dict[str, Array] = {}
        self._committing = False
        self._start(next(flow))

    def progress(self) -> None:
        """Go on as far as possible."""
        while not self.done and MPI.Request.Testall(self._requests):
            if not self._committing:
                self._start(self._flow.send(self._results))
            elif self._flag.Test():
                self._finish()
            else:
                return

    def _start(self, request: Send | Commit) -> None:
        self._requests, self._buffers, self._results = [], [], {}
        if isinstance(request, Commit):
            self._committing = True
            return
        for name, array, how in sorted(request, key=lambda each: each[0]):
            part = np.ascontiguousarray(array)
            self._buffers.append(part)
            self._results[name] = self._combine(part, how, self._comms[request.group])

    def _combine(self, part: Array, how: str, comm: MPI.Intracomm) -> Array:
        ranks = comm.size
        if how in ("gather", "all_to_all"):
            rows = (ranks, part.size if how == "gather" else part.size // ranks)
            result = np.empty(rows, part.dtype)
            start = comm.Iallgather if how == "gather" else comm.Ialltoall
            self._requests.append(start(part, result))
            return result
        result = np.empty_like(part)
        op = MPI.MAX if how == "max" else MPI.SUM
        if part.dtype == np.float16:  # MPI knows no half precision: two bytes, and a sum of our own
            self._requests.append(comm.Iallreduce([part, MPI.UINT16_T], [result, MPI.UINT16_T], _sum_of_halves()))
        else:
            self._requests.append(comm.Iallreduce(part, result, op))
        return result

    def _finish(self) -> None:
        try:
            self._flow.send((self.verdict > 0).astype(np.float32))
        except StopIteration as end:
            self.result, self.done = end.value, True
            return
        raise AssertionError("a flow sent something after its commit")


@cache
def _sum_of_halves() -> MPI.Op:
    def add(one: Any, other: Any, datatype: MPI.Datatype) -> None:
        total = np.frombuffer(other, np.float16)
        with np.errstate(over="ignore", invalid="ignore"):
            total += np.frombuffer(one, np.float16)

    return MPI.Op.Create(add, commute=True)
