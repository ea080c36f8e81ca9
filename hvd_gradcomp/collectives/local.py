"""N ranks in lockstep in one process: for tests, simulation and learning how it works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.exchange.base import Commit, Flow, Send, wire_bytes
from hvd_gradcomp.flow import reduce_gradient
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.plan import Plan, Slot
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.spec import TensorSpec


class LocalWorld:
    """A world of ``ranks`` whose gradients are reduced together, without MPI, at any N.

    Args:
        spec: what users pass as ``compression``: a spec string, codec, schedule, dict of rules.
        shapes: name to shape of each tensor.
        ranks: world size.
        ops: array operations (default numpy).
        delayed: whether ``sum`` scales by earlier steps; not where steps are traced, or have no values.
        state: makes a state array from a new zero array (TensorFlow: ``tf.Variable``).

    Every tensor is compressed, whatever its size, unless ``min_size`` says otherwise.
    """

    def __init__(self, spec: Any, shapes: Mapping[str, Sequence[int]], ranks: int, *, ops: Ops | None = None,
                 exchange: str = "auto", min_size: int = 0, seed: int = 0, error_feedback: bool = True,
                 dgc: bool = False, verify: bool = False, delayed: bool = True,
                 state: Callable[[Array], Array] = lambda array: array) -> None:
        if ops is None:
            from hvd_gradcomp.ops.numpy import NumpyOps

            ops = NumpyOps()
        self.ops, self.ranks, self.seed = ops, ranks, seed
        self.received_bytes = 0.0
        """What rank 0 has received so far, counted from what was really sent."""
        specs = [TensorSpec(name, tuple(shape)) for name, shape in shapes.items()]
        self.plans = [Plan.make(specs, Policy.make(spec, min_size), ranks=ranks, exchange=exchange, seed=seed,
                                error_feedback=error_feedback, dgc=dgc, verify=verify, delayed=delayed)
                      for _ in range(ranks)]
        for plan in self.plans:
            for slot in plan.slots.values():
                plan.allocate(slot, lambda name, length, dtype: state(ops.zeros((length,), dtype)))

    def step(self, grads: Sequence[Mapping[str, Array]], *, loss_scale: float | None = None,
             sgd: Momentum | None = None) -> list[dict[str, Array]]:
        """Reduce one step's gradients; ``grads[rank][name]`` in and out, out being the mean.

        ``sgd`` is what a world with ``dgc`` does with each gradient. An uncompressed tensor is averaged
        in float32. A non-finite value anywhere voids the step.
        """
        names = list(self.plans[0].slots)
        flat = [{name: self.ops.reshape(grads[rank][name], (-1,)) for name in names} for rank in range(self.ranks)]
        verdict = self.ops.constant([1.0], "float32")
        for rank in range(self.ranks):
            for name in names:
                verdict = self.ops.minimum(verdict, self.ops.all_finite(flat[rank][name]))
        outs: list[dict[str, Array]] = [{} for _ in range(self.ranks)]
        for name in names:
            slots = [plan.slots[name] for plan in self.plans]
            if slots[0].codec is None:
                total = flat[0][name]
                for rank in range(1, self.ranks):
                    total = total + flat[rank][name]
                self.received_bytes += wire_bytes("sum", 4 * slots[0].spec.numel, self.ranks)
                results = [self.ops.poison(self.ops.divide(total + 0.0, self.ranks), verdict)
                           for _ in range(self.ranks)]
            else:
                results = self.run([
                    reduce_gradient(flat[rank][name], slot, self.ctx(rank, name), stage=self._stage(slot),
                                    loss_scale=loss_scale, sgd=sgd) for rank, slot in enumerate(slots)], verdict)
            for rank, result in enumerate(results):
                outs[rank][name] = self.ops.reshape(result, slots[rank].spec.shape)
        return outs

    def ctx(self, rank: int, name: str) -> Ctx:
        """What encode and decode of this rank and tensor look at."""
        slot = self.plans[rank].slots[name]
        return Ctx(self.ops, slot.spec, self.ranks, rank, self.seed, state=slot.state,
                   error_feedback=self.plans[rank].error_feedback, buffers=slot.buffers)

    @staticmethod
    def _stage(slot: Slot) -> int:
        if len(slot.stages) <= 1:
            return 0
        return slot.stage(int(np.asarray(slot.state["step"])[0]))

    def run(self, flows: list[Flow], verdict: Array) -> list[Array]:
        """Drive one flow per rank to its end. Raises UsageError if the ranks do not send alike."""
        results: list[Any] = [None] * len(flows)
        answers: list[Any] = [None] * len(flows)
        while True:
            requests: list[Any] = []
            for rank, flow in enumerate(flows):
                try:
                    requests.append(flow.send(answers[rank]))
                except StopIteration as end:
                    results[rank] = end.value
            if not requests:
                return results
            if len(requests) != len(flows) or len({type(request) for request in requests}) != 1:
                raise UsageError(f"ranks do not send alike: {[_shape_of(request) for request in requests]}")
            answers = [verdict] * len(flows) if isinstance(requests[0], Commit) else self._combine(requests)

    def _combine(self, sends: list[Send]) -> list[dict[str, Array]]:
        """What every rank receives, group by group."""
        results: list[dict[str, Array]] = [{} for _ in sends]
        everyone = tuple(range(len(sends)))
        for group in dict.fromkeys(send.group or everyone for send in sends):
            members = [rank for rank, send in enumerate(sends) if (send.group or everyone) == group]
            if members != list(group) or len({_shape_of(sends[rank]) for rank in group}) != 1:
                raise UsageError(f"ranks do not send alike: {[_shape_of(send) for send in sends]}")
            for rank, result in zip(group, self._combined([sends[rank] for rank in group], 0 in group), strict=True):
                results[rank] = result
        return results

    def _combined(self, sends: list[Send], counted: bool) -> list[dict[str, Array]]:
        ranks = len(sends)
        results: list[dict[str, Array]] = [{} for _ in sends]
        for each in zip(*sends, strict=True):
            name, _, how = each[0]
            arrays = [array for _, array, _ in each]
            length = int(arrays[0].shape[0])
            if counted:
                self.received_bytes += wire_bytes(how, length * np.dtype(self.ops.dtype(arrays[0])).itemsize, ranks)
            if how == "all_to_all":
                row = length // ranks
                for rank, result in enumerate(results):
                    rows = self.ops.concat([array[rank * row : (rank + 1) * row] for array in arrays])
                    result[name] = self.ops.reshape(rows, (ranks, row))
                continue
            if how == "gather":
                total = self.ops.reshape(self.ops.concat(arrays), (ranks, length))
            else:
                total = arrays[0]
                for array in arrays[1:]:
                    total = total + array if how == "sum" else self.ops.maximum(total, array)
            for result in results:
                result[name] = total
        return results


def alone(ops: Ops, flow: Flow, verdict: Array) -> Array:
    """Drive the flow of a world of one rank to its end: what it sends is what comes back."""
    answer: Any = None
    while True:
        try:
            request = flow.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(request, Commit):
            answer = verdict
            continue
        # Copies, as from any transport: a payload may be the gradient itself, whose storage the mean goes to.
        answer = {name: ops.concat([array]) for name, array, _ in request}
        if request.how in ("gather", "all_to_all"):
            answer = {name: ops.reshape(array, (1, int(array.shape[0]))) for name, array in answer.items()}


def _shape_of(request: Send | Commit) -> str:
    if isinstance(request, Commit):
        return "commit"
    parts = ", ".join(f"{name}[{tuple(array.shape)}]" for name, array, _ in request)
    return f"{request.how} {parts}" if request.group is None else f"{request.how} {parts} over {request.group}"
