"""Horovod's asynchronous collectives on torch tensors, and the rules that keep them from hanging."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hvd_gradcomp import require
from hvd_gradcomp.collectives.process_sets import Sets
from hvd_gradcomp.exchange.base import Commit, Flow, Send
from hvd_gradcomp.ops.base import Array

hvd: Any = require.horovod("horovod.torch")


def gather_bytes(data: bytes, process_set: Any, name: str) -> list[bytes]:
    """Everyone's bytes in rank order. Waits; for the one exchange before the first step."""
    lengths = hvd.allgather(torch.tensor([len(data)]), name=f"{name}.lengths", process_set=process_set).tolist()
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = hvd.allgather(mine, name=f"{name}.bytes", process_set=process_set)
    return [bytes(piece.tolist()) for piece in everyone.split(lengths)]


class _Collective:
    """One tensor on its way."""

    def __init__(self, tensor: torch.Tensor, how: str, name: str, process_set: Any) -> None:
        self._how, self._ranks = how, process_set.size()
        if how == "gather":
            self._handle = hvd.allgather_async(tensor, name=name, process_set=process_set)
        elif how == "all_to_all":
            self._handle = hvd.alltoall_async(tensor, name=name, process_set=process_set)
        else:
            op = hvd.Sum if how == "sum" else hvd.Max
            self._handle = hvd.allreduce_async(tensor, name=name, op=op, process_set=process_set)

    def ready(self) -> bool:
        return bool(hvd.poll(self._handle))

    def wait(self) -> torch.Tensor:
        result = hvd.synchronize(self._handle)
        if self._how == "all_to_all":
            result, _ = result  # the second says how much came from each rank: equal rows
        return result if self._how in ("sum", "max") else result.view(self._ranks, -1)


class Bucket:
    """The all-to-all rows of several tensors in one message. Horovod fuses small tensors of every other
    collective; 60 of these cost it 70 ms."""

    def __init__(self, name: str, process_set: Any) -> None:
        self._name, self._process_set = name, process_set
        self.begin(0)

    def begin(self, members: int) -> None:
        """A new step, in which that many tensors are expected."""
        self._members = members
        self._rows: dict[int, torch.Tensor] = {}
        self._collective: _Collective | None = None
        self._received: dict[int, torch.Tensor] = {}

    def add(self, place: int, rows: torch.Tensor) -> _Share:
        """Add a tensor's rows, uint8 ``[ranks * width]``; the last one expected starts the message. Tensors come
        in any order: they travel in the order of their places, which all ranks have in common."""
        self._rows[place] = rows.view(self._process_set.size(), -1)
        if len(self._rows) == self._members:
            self.start()
        return _Share(self, place)

    def start(self) -> None:
        """Send what was added, unless that is done: a gradient that is sparse never comes."""
        if self._rows and self._collective is None:
            device = next(iter(self._rows.values())).device
            rows = torch.cat([self._rows[place].to(device) for place in sorted(self._rows)], dim=1)
            self._collective = _Collective(rows.view(-1), "all_to_all", self._name, self._process_set)

    def ready(self) -> bool:
        return bool(self._received) or (self._collective is not None and self._collective.ready())

    def wait(self, place: int) -> torch.Tensor:
        if not self._received:
            assert self._collective is not None
            joined, start = self._collective.wait(), 0
            for i in sorted(self._rows):
                width = self._rows[i].shape[1]
                self._received[i] = joined[:, start : start + width].to(self._rows[i].device)
                start += width
        return self._received[place]


class _Share:
    """One tensor's rows in a bucket."""

    def __init__(self, bucket: Bucket, place: int) -> None:
        self._bucket, self._place = bucket, place

    def ready(self) -> bool:
        return self._bucket.ready()

    def wait(self) -> torch.Tensor:
        return self._bucket.wait(self._place)


class OpenExchange:
    """One tensor's flow between its first send and its commit. Nothing here waits except
    :meth:`finish_round`.

    Args:
        sets: the process set of each group that it combines over; that of all ranks under None.
        bucket: what its first all-to-all travels in, if not alone, and its place there.
    """

    def __init__(self, name: str, flow: Flow, sets: Sets, bucket: tuple[Bucket, int] | None = None) -> None:
        self.name, self.flow, self.sets = name, flow, sets
        self.round = 0
        self.committing = self.finite = False
        self._bucket = bucket
        self._running: dict[str, _Collective | _Share] = {}
        self._start(next(flow))

    def _start(self, request: Send | Commit) -> None:
        self._running = {}
        if isinstance(request, Commit):
            self.committing = True
            return
        self.finite = self.finite or request.finite
        for part, tensor, how in request:
            if how == "all_to_all" and request.group is None and self._bucket is not None:
                (bucket, place), self._bucket = self._bucket, None
                self._running[part] = bucket.add(place, tensor)
                continue
            # Named by parameter, round and part, never by step: Horovod's response cache stays warm.
            name = f"{self.name}.{self.round}.{part}"
            self._running[part] = _Collective(tensor, how, name, self.sets[request.group])

    def ready(self) -> bool:
        """Whether this round's collectives are done, so that finishing it would not wait."""
        return all(running.ready() for running in self._running.values())

    def finish_round(self) -> None:
        """Wait for this round, then start the next one."""
        results = {part: running.wait() for part, running in self._running.items()}
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


WINDOW = 3
"""Flows of :func:`in_turn` that are begun at a time."""


def in_turn(flows: Iterable[tuple[str, Flow]], sets: Sets, ok: Array) -> Iterator[Array]:
    """Drive flows to their ends one after the other, the same on every rank, and give their results. While one is
    decoded, the next is on the wire and the one after it is encoded. Flows are made as they are begun."""
    running: deque[OpenExchange] = deque()

    def end_first() -> Array:
        first = running.popleft()
        while not first.committing:
            first.finish_round()
        return first.commit(ok)

    for name, flow in flows:
        running.append(OpenExchange(name, flow, sets))
        poll(deque(running))
        if len(running) == WINDOW:
            yield end_first()
    while running:
        yield end_first()


def finish(exchanges: list[OpenExchange], buckets: list[Bucket]) -> None:
    """Drive all exchanges to their commit, round by round: never waiting for round r + 1 of one
    while another, which a peer may be waiting for, is still in round r."""
    for bucket in buckets:
        bucket.start()
    while True:
        running = [exchange for exchange in exchanges if not exchange.committing]
        if not running:
            return
        current = min(exchange.round for exchange in running)
        for exchange in running:
            if exchange.round == current:
                exchange.finish_round()
