"""Bytes on the wire, counted from the plan: sizes never depend on values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_gradcomp import kernels, payload
from hvd_gradcomp.exchange.base import wire_bytes
from hvd_gradcomp.plan import Plan, Slot

FLOAT32 = 4


def step_bytes(slot: Slot, ranks: int, stage: int = 0) -> float:
    """Bytes that one rank receives (and sends) for this tensor in one step of a stage."""
    if not slot.stages:
        return dense_step_bytes(slot, ranks)
    return slot.received(stage, ranks)


def dense_step_bytes(slot: Slot, ranks: int) -> float:
    """The same for a float32 ring all-reduce of the gradient."""
    return wire_bytes("sum", FLOAT32 * slot.spec.numel, ranks)


def summary(plan: Plan, ranks: int, steps: Mapping[str, Sequence[int]], extra: Mapping[str, Mapping[str, Any]],
            overhead: float = 0.0) -> dict[str, Any]:
    """What ``Compression.stats()`` returns.

    Args:
        steps: reductions done, by tensor and by stage of its schedule.
        extra: what an adapter adds to each tensor's entry (residual norm, another reason).
        overhead: bytes received per step beside the tensors' own (tokens, step flag).
    """
    tensors: dict[str, dict[str, Any]] = {}
    wire = dense = 0.0
    for name, slot in plan.slots.items():
        counts = steps[name]
        wire += sum(count * step_bytes(slot, ranks, stage) for stage, count in enumerate(counts))
        dense += sum(counts) * dense_step_bytes(slot, ranks)
        entry: dict[str, Any] = {"shape": slot.spec.shape, "steps": sum(counts)}
        if not slot.stages:
            entry |= {"codec": None, "exchange": "horovod", "reason": slot.reason,
                      "payload_bytes": FLOAT32 * slot.spec.numel, "wire_bytes": round(dense_step_bytes(slot, ranks))}
        else:
            # of the stage reached last
            now = slot.stages[max((i for i, count in enumerate(counts) if count), default=0)]
            entry |= {"codec": str(now.codec), "exchange": now.exchange.name,
                      "payload_bytes": payload.nbytes(now.codec.layout(slot.spec)),
                      "wire_bytes": round(now.exchange.received(now.codec, slot.spec, ranks))}
        tensors[name] = entry | dict(extra.get(name, {}))
    done = max((sum(counts) for counts in steps.values()), default=0)
    wire += done * overhead
    return {"steps": done, "wire_bytes_sent": round(wire), "wire_bytes_received": round(wire),
            "dense_bytes": round(dense), "ratio": dense / wire if wire else 1.0, "ranks": ranks,
            "kernels": kernels.status(), "tensors": tensors}
