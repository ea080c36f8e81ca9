"""``Compression``: all-reduces of named numpy arrays over an MPI communicator, compressed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hvd_gradcomp import agreement, state, stats
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.collectives import mpi
from hvd_gradcomp.collectives.mpi import OpenExchange
from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.exchange import with_hosts
from hvd_gradcomp.exchange.base import Commit, Flow, Send, wire_bytes
from hvd_gradcomp.flow import reduce_gradient
from hvd_gradcomp.memory import error_feedback as memory
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.plan import Exchanges, Plan, Slot
from hvd_gradcomp.policy import DEFAULT_MIN_SIZE, Policy
from hvd_gradcomp.spec import TensorSpec

Floats = NDArray[np.floating[Any]]

OPS = NumpyOps()
_FLOATS = ("float16", "float32", "float64")
_PAUSE = 2e-5  # seconds between two looks at what runs: ranks that share a core must let each other run
_BAD = -1.0  # the verdict of a rank that was given something else than before


class Compression:
    """Compressed all-reduces over the ranks of a communicator.

    ::

        compression = Compression(MPI.COMM_WORLD, "topk(ratio=0.01)")
        mean = compression.allreduce(gradient, name="weights")

    Every rank calls it with the same names. What belongs to a name (residual, codec state) is found by it, and
    its shape and dtype stay. The first use of a name compares the ranks' configuration, and waits for them:
    these first uses, and the creation itself, come in one order on all ranks. Later calls may come
    in any order, and so may the waits. With one rank nothing is exchanged and nothing is compressed.

    An inf or NaN in an array on any rank makes that reduction NaN on every rank and moves no state.

    Args:
        comm: an intracommunicator, of all ranks or some of them; it is duplicated, for each name too, so
            what else travels on it is not disturbed.
        compression: spec string or codec; or different ones by name, shape or step, see :meth:`Policy.make`.
        exchange: how payloads are combined: ``"auto"``, ``"sum"``, ``"gather"``, ``"two_stage"``,
            ``"sparse_split"``, ``"hierarchical"``; or a dict of name patterns to these.
        min_size: arrays with fewer elements are reduced as they are; 0 compresses all.
        loss_scale: what the loss is multiplied by (a number, or a callable that gives one): residuals are kept
            divided by it.
        seed: of the stochastic codecs.
        error_feedback: keep what was not sent and add it to the next array of that name.
        verify: send a checksum with what is gathered; wrong bytes are an error that names their rank, at a cost
            (``docs/state.md``). For all ranks alike.

    Raises:
        SpecError: a spec, exchange or min_size that cannot be.
        UsageError: ``comm`` is no intracommunicator that this rank is part of.
    """

    def __init__(self, comm: MPI.Intracomm, compression: Any, *, exchange: Exchanges = "auto",
                 min_size: int = DEFAULT_MIN_SIZE, loss_scale: float | Callable[[], float] | None = None, seed: int = 0,
                 error_feedback: bool = True, verify: bool = False) -> None:
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise UsageError(f"comm must be an intracommunicator that this rank is part of, such as MPI.COMM_WORLD, "
                             f"not {comm!r}")
        self.plan = Plan.make([], Policy.make(compression, min_size), ranks=comm.size,
                              exchange=with_hosts(exchange, lambda: mpi.local_size(comm)), seed=seed,
                              error_feedback=error_feedback, verify=verify)
        self.loss_scale = loss_scale
        self._comm = comm.Dup()
        self._comms: dict[str, mpi.Comms] = {}  # of the names that the ranks agreed on
        self._open: dict[str, OpenExchange] = {}
        self._steps: dict[str, list[int]] = {}

    def allreduce(self, array: Floats, *, name: str, op: str = "mean") -> Floats:
        """The mean (or ``op="sum"``) over the ranks of ``array``; see :meth:`iallreduce`."""
        return self.iallreduce(array, name=name, op=op).wait()

    def iallreduce(self, array: Floats, *, name: str, op: str = "mean") -> Request:
        """Start an all-reduce.

        Args:
            array: float16, float32 or float64, of any shape, which must not change before ``wait()`` returns.
            name: which of the ranks' arrays belong together.
            op: ``"mean"`` or ``"sum"``.

        Raises:
            UsageError: another op or dtype, or ``name`` is still being reduced.
            DisagreementError: on every rank, if the ranks' configurations, shapes or dtypes differ at first use.
        """
        if op not in ("mean", "sum"):
            raise UsageError(f"op must be 'mean' or 'sum', not {op!r}")
        if name in self._open:
            raise UsageError(f"{name!r} is still being reduced: wait() for it before it is given again")
        array = np.asarray(array)
        ranks = self._comm.size
        if ranks == 1:
            return Request(lambda: np.array(array), lambda: True)
        spec = TensorSpec(name, array.shape, str(array.dtype))
        if name not in self._comms:
            self._agree(spec)
        slot = self.plan.slots[name]
        wrong = ""
        if spec != slot.spec:  # the peers are told, by the verdict, and nothing hangs
            wrong = (f"{name!r} is {spec.dtype}{list(spec.shape)} on rank {self._comm.rank}, and was "
                     f"{slot.spec.dtype}{list(slot.spec.shape)}")
            array = np.zeros(slot.spec.shape, slot.spec.dtype)
        finite = bool(np.isfinite(array).all())
        stage = self._stage(slot)
        exchange = OpenExchange(self._flow(slot, array, stage), self._comms[name],
                                _BAD if wrong else 1.0 if finite else 0.0)
        self._open[name] = exchange

        def finish() -> Floats:
            del self._open[name]
            if exchange.verdict[0] == _BAD:
                raise UsageError(wrong or f"another rank gave {name!r} in another shape or dtype than before")
            self._steps[name][stage] += 1
            total = exchange.result if op == "mean" else exchange.result * np.float32(ranks)
            return total.reshape(slot.spec.shape).astype(slot.spec.dtype)

        def progress() -> bool:
            for each in list(self._open.values()):  # a peer may be waiting for any of them
                each.progress()
            return exchange.done

        return Request(finish, progress)

    # -- one reduction --------------------------------------------------------------------------

    def _agree(self, spec: TensorSpec) -> None:
        new = self._slots([spec])
        agreement.check(new, lambda data: mpi.gather_bytes(data, self._comm))
        if spec.dtype not in _FLOATS:
            raise UsageError(f"{spec.name!r} is {spec.dtype}: arrays must be {', '.join(_FLOATS)}")
        for name, slot in new.slots.items():
            self._add(name, self.plan.slots.get(name, slot))  # it may have come from load_state_dict
        self._comms[spec.name] = mpi.connect(self._comm, new.exchanges)

    def _slots(self, specs: list[TensorSpec]) -> Plan:
        """The plan of some arrays alone."""
        plan = self.plan
        return Plan.make(specs, plan.policy, ranks=plan.ranks, exchange=plan.exchange, seed=plan.seed,
                         error_feedback=plan.error_feedback, verify=plan.verify)

    def _add(self, name: str, slot: Slot) -> None:
        self.plan.slots[name] = slot
        self.plan.allocate(slot, lambda _, length, dtype: OPS.zeros((length,), dtype))
        self._steps.setdefault(name, [0] * max(len(slot.stages), 1))

    def _flow(self, slot: Slot, array: Floats, stage: int) -> Flow:
        if slot.codec is None:
            return _dense(array.reshape(-1).astype(np.promote_types(array.dtype, np.float32)), self._comm.size)
        x = np.ascontiguousarray(array.reshape(-1), np.float32)
        ctx = Ctx(OPS, slot.spec, self._comm.size, self._comm.rank, self.plan.seed, state=slot.state,
                  error_feedback=self.plan.error_feedback, buffers=slot.buffers)
        scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
        return reduce_gradient(x, slot, ctx, stage=stage, loss_scale=None if scale is None else np.float32(scale))

    @staticmethod
    def _stage(slot: Slot) -> int:
        return slot.stage(int(slot.state["step"][0])) if len(slot.stages) > 1 else 0

    # -- what users ask -------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Bytes and choices so far on this rank.

        Returns:
            ``steps``; ``wire_bytes_sent`` and ``wire_bytes_received`` (this rank's, counted as ring
            collectives, verdicts included); ``dense_bytes`` (what a float32 ring all-reduce would have
            received); ``ratio`` (dense_bytes / wire_bytes_received); ``ranks``; ``tensors``: by name
            codec, exchange, payload bytes, bytes per step, residual norm, or the reason why it is not compressed.
        """
        extra = {name: {"residual_norm": float(np.linalg.norm(slot.state[memory.STATE]))}
                 for name, slot in self.plan.slots.items() if memory.STATE in slot.state}
        overhead = wire_bytes("sum", 4, self._comm.size) * len(self.plan.slots)
        return stats.summary(self.plan, self._comm.size, self._steps, extra, overhead)

    @property
    def world(self) -> tuple[int, int]:
        """``(rank, ranks)`` in the communicator."""
        return self._comm.rank, self._comm.size

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's bytes in rank order; waits for all ranks."""
        return mpi.gather_bytes(data, self._comm)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and codec state: numpy arrays and plain values, for one file per rank. See
        :mod:`hvd_gradcomp.checkpoint` for files, and :mod:`hvd_gradcomp.state` for what it holds."""
        return state.save(self.plan, *self.world, np.copy)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` of the same rank, number of ranks and configuration, on every rank.

        Raises StateError, before anything is changed, if it does not fit.
        """
        new = self.plan_for(state_dict)
        state.restore(state_dict, new, *self.world, np.copyto)
        for name, slot in new.slots.items():
            self._add(name, slot)

    def plan_for(self, saved: Mapping[str, Any]) -> Plan:
        """The plan of the arrays that were saved: names become known when they are first used, here or there."""
        try:
            specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype, *_ in saved["plan"][1:]]
        except (KeyError, TypeError, ValueError):
            specs = []  # what checks it says what is wrong
        new = self._slots(specs)
        for slot in new.slots.values():
            new.allocate(slot, lambda _, length, dtype: OPS.zeros((length,), dtype))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("a Compression cannot be copied or pickled: it owns communicators. Save its state_dict(), and "
                         "load that into a new Compression")

    def free(self) -> None:
        """Give the duplicated communicators back. Collective; nothing may be open."""
        if self._open:
            raise UsageError(f"{next(iter(self._open))!r} is still being reduced: wait() for it before free()")
        for comm in (*(comm for comms in self._comms.values() for comm in comms.values()), self._comm):
            comm.Free()
        self._comms.clear()


class Request:
    """A reduction that has been started."""

    def __init__(self, finish: Callable[[], Floats], progress: Callable[[], bool]) -> None:
        self._finish, self._progress = finish, progress
        self._result: Floats | None = None

    def test(self) -> bool:
        """Whether :meth:`wait` would return at once; also lets all open reductions go on."""
        return self._result is not None or self._progress()

    def wait(self) -> Floats:
        """The reduced array, new, in the shape and dtype of the one given. May be called again.

        Raises UsageError, on every rank, if one gave an array of another shape or dtype than before.
        """
        while not self.test():
            time.sleep(_PAUSE)
        if self._result is None:
            self._result = self._finish()
        return self._result


def _dense(x: Floats, ranks: int) -> Flow:
    """An all-reduce of the array itself."""
    total = yield Send({"values": x}, "sum")
    ok = yield Commit()
    return OPS.poison(OPS.divide(total["values"], ranks), ok)
