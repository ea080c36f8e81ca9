"""Horovod's asynchronous collectives on torch tensors, and the rules that keep them from hanging."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from hvd_gradcomp import require
from hvd_gradcomp.exchange.base import Commit, Flow, Send
from hvd_gradcomp.ops.base import Array

hvd: Any = require.horovod("horovod.torch")


def gather_bytes(data: bytes, process_set: Any, name: str) -> list[bytes]:
    """Everyone's bytes in rank order. Waits; for the one exchange before the first step."""
    lengths = hvd.allgather(torch.tensor([len(data)]), name=f"{name}.lengths", process_set=process_set).tolist()
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = hvd.allgather(mine, name=f"{name}.bytes", process_set=process_set)
    return [bytes(piece.tolist()) for piece in everyone.split(lengths)]


class OpenExchange:
    """One tensor's flow between its first send and its commit. Nothing here waits except
    :meth:`finish_round`."""

    def __init__(self, name: str, flow: Flow, process_set: Any) -> None:
        self.name, self.flow, self.process_set = name, flow, process_set
        self.round = 0
        self.committing = False
        self._handles: dict[str, int] = {}
        self._send: Send | None = None
        self._start(next(flow))

    def _start(self, request: Send | Commit) -> None:
        self._handles = {}
        if isinstance(request, Commit):
            self.committing, self._send = True, None
            return
        self._send = request
        for part, tensor in request.parts.items():
            # Named by parameter, round and part, never by step: Horovod's response cache stays warm.
            name = f"{self.name}.{self.round}.{part}"
            if request.how == "gather":
                handle = hvd.allgather_async(tensor, name=name, process_set=self.process_set)
            elif request.how == "all_to_all":
                handle = hvd.alltoall_async(tensor, name=name, process_set=self.process_set)
            else:
                op = hvd.Sum if request.how == "sum" else hvd.Max
                handle = hvd.allreduce_async(tensor, name=name, op=op, process_set=self.process_set)
            self._handles[part] = handle

    def ready(self) -> bool:
        """Whether this round's collectives are done, so that finishing it would not wait."""
        return all(hvd.poll(handle) for handle in self._handles.values())

    def finish_round(self) -> None:
        """Wait for this round, then start the next one."""
        assert self._send is not None
        how, ranks = self._send.how, self.process_set.size()
        results: dict[str, Array] = {}
        for part, handle in self._handles.items():
            result = hvd.synchronize(handle)
            if how == "all_to_all":
                result, _ = result  # the second says how much came from each rank: equal rows
            results[part] = result if how in ("sum", "max") else result.view(ranks, -1)
        self.round += 1
        self._start(self.flow.send(results))

    def commit(self, ok: Array) -> Array:
        """Give the verdict; the flow settles its memory and returns the mean."""
        try:
            self.flow.send(ok)
        except StopIteration as end:
            return end.value
        raise AssertionError("a flow sent something after its commit")


def poll(running: deque[OpenExchange]) -> None:
    """Start next rounds of the oldest exchanges, as far as that needs no waiting; what has no more
    rounds leaves the queue."""
    while running and (running[0].committing or running[0].ready()):
        if running[0].committing:
            running.popleft()
        else:
            running[0].finish_round()


def finish(exchanges: list[OpenExchange]) -> None:
    """Drive all exchanges to their commit, round by round: never waiting for round r + 1 of one
    while another, which a peer may be waiting for, is still in round r."""
    while True:
        running = [exchange for exchange in exchanges if not exchange.committing]
        if not running:
            return
        current = min(exchange.round for exchange in running)
        for exchange in running:
            if exchange.round == current:
                exchange.finish_round()
