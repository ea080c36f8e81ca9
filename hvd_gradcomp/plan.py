"""The plan: every bound tensor with its codec, exchange and state. Equal on all ranks, or an error."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.exchange import choose
from hvd_gradcomp.exchange.base import Exchange
from hvd_gradcomp.memory import error_feedback
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.spec import TensorSpec
from hvd_gradcomp.version import __version__

Allocate = Callable[[str, int, str], Array]
"""``(name, length, dtype)`` to a new state array of zeros."""


@dataclass
class Slot:
    """One tensor: how it is reduced, and its state on this rank."""

    spec: TensorSpec
    codec: Codec | None
    exchange: Exchange | None
    reason: str = ""
    """Why it is not compressed, if it is not."""
    state: dict[str, Array] = field(default_factory=dict)

    def state_layout(self, memory: bool) -> dict[str, tuple[int, str]]:
        """Name to (length, dtype) of the state arrays this tensor needs."""
        layout: dict[str, tuple[int, str]] = {}
        if self.codec is not None:
            if memory and not self.codec.lossless:
                layout[error_feedback.STATE] = (self.spec.numel, "float32")
            if self.codec.uses_step:
                layout["step"] = (1, "int32")
            layout |= self.codec.state(self.spec)
        return layout


@dataclass(frozen=True)
class Plan:
    """The slots in the order in which the user named the tensors."""

    slots: dict[str, Slot]
    policy: Policy
    exchange: str
    seed: int
    error_feedback: bool

    @classmethod
    def make(cls, specs: Iterable[TensorSpec], policy: Policy, *, exchange: str = "auto", seed: int = 0,
             error_feedback: bool = True, refuse: Callable[[TensorSpec], str] = lambda spec: "") -> Plan:
        """Choose for every tensor. ``refuse`` gives an adapter's own reasons not to compress one."""
        choose(policy.codec, exchange)  # an exchange that cannot carry the codec is an error at once
        slots: dict[str, Slot] = {}
        for spec in specs:
            if spec.name in slots:
                raise UsageError(f"two tensors are named {spec.name!r}; names must be unique")
            codec, reason = policy.choose(spec)
            if codec is not None and refuse(spec):
                codec, reason = None, refuse(spec)
            slots[spec.name] = Slot(spec, codec, choose(codec, exchange) if codec else None, reason)
        return cls(slots, policy, exchange, seed, error_feedback)

    @property
    def compresses(self) -> bool:
        """Whether any tensor is compressed."""
        return any(slot.codec is not None for slot in self.slots.values())

    def allocate(self, slot: Slot, allocate: Allocate) -> None:
        """Give a slot the state arrays it still lacks."""
        for name, (length, dtype) in slot.state_layout(self.error_feedback).items():
            if name not in slot.state:
                slot.state[name] = allocate(name, length, dtype)

    def describe(self) -> list[Any]:
        """Everything that ranks must agree on, as JSON values: settings, then a row per tensor."""
        settings = {"version": __version__, "codec": str(self.policy.codec), "exchange": self.exchange,
                    "min_size": self.policy.min_size, "seed": self.seed, "error_feedback": self.error_feedback}
        rows = [[slot.spec.name, list(slot.spec.shape), str(slot.codec or "dense"),
                 slot.exchange.name if slot.exchange else "horovod"] for slot in self.slots.values()]
        return [settings, *rows]

    def digest(self) -> bytes:
        """16 bytes that are equal exactly when :meth:`describe` is."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).digest()[:16]


def differences(descriptions: list[list[Any]]) -> list[str]:
    """One line for each rank whose description is not that of the majority (of rank 0 in a tie)."""
    texts = [json.dumps(description, sort_keys=True) for description in descriptions]
    counts = Counter(texts)
    common = max(range(len(texts)), key=lambda rank: (counts[texts[rank]], -rank))
    return [f"rank {rank}: {_difference(descriptions[rank], descriptions[common])} (as on rank {common})"
            for rank in range(len(texts)) if texts[rank] != texts[common]]


def _difference(mine: list[Any], theirs: list[Any]) -> str:
    for key in mine[0]:
        if mine[0][key] != theirs[0].get(key):
            return f"{key} is {mine[0][key]!r}, not {theirs[0].get(key)!r}"
    ours, others = {row[0]: row for row in mine[1:]}, {row[0]: row for row in theirs[1:]}
    for name in others:
        if name not in ours:
            return f"tensor {name!r} is missing; it is there"
    for name, row in ours.items():
        if name not in others:
            return f"tensor {name!r} is there; it is missing"
        for what, one, other in zip(("", "shape", "codec", "exchange"), row, others[name], strict=True):
            if one != other:
                return f"{what} of tensor {name!r} is {one}, not {other}"
    return f"the tensors come in another order: {list(ours)}, not {list(others)}"
