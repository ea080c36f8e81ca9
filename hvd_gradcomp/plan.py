"""The plan: every bound tensor with its codec, exchange and state. Equal on all ranks, or an error."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.errors import SpecError, UsageError
from hvd_gradcomp.exchange import choose
from hvd_gradcomp.exchange.base import Exchange
from hvd_gradcomp.exchange.hierarchical import Hierarchical
from hvd_gradcomp.exchange.sum import Sum
from hvd_gradcomp.exchange.two_stage import TwoStage
from hvd_gradcomp.exchange.verified import Verified
from hvd_gradcomp.memory import dgc as momentum
from hvd_gradcomp.memory import error_feedback
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.schedule import Schedule
from hvd_gradcomp.spec import TensorSpec
from hvd_gradcomp.version import __version__

Exchanges = str | Mapping[str, str]
"""The name of an exchange, or one for each pattern of tensor names: the first that fits; else ``auto``."""

LARGE = 1 << 26
"""Elements above which a tensor is exchanged in pieces, where an adapter can do that: 256 MB of float32."""

_PIECES = 64  # that are as long as LARGE
_MULTIPLE = 1024  # elements, so that blocks are those of the whole tensor

Allocate = Callable[[str, int, str], Array]
"""``(name, length, dtype)`` to a new state array of zeros."""


@dataclass(frozen=True)
class Stage:
    """A codec and the exchange that carries its payload."""

    codec: Codec
    exchange: Exchange
    begin: int = 0
    """The first step that it is for."""


@dataclass
class Slot:
    """One tensor: how it is reduced, and its state on this rank."""

    spec: TensorSpec
    schedule: Schedule | None
    """Its codecs by step; None if it is not compressed."""
    stages: tuple[Stage, ...]
    reason: str = ""
    """Why it is not compressed, if it is not."""
    state: dict[str, Array] = field(default_factory=dict)
    buffers: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Payloads that are written anew in each step (``Ctx.buffers``)."""
    cuts: tuple[tuple[int, int], ...] = ()
    """Begin and end of the pieces that it is exchanged in, one after the other; empty if as a whole."""
    complete: bool = False
    """Whether all state arrays are there."""

    @property
    def codec(self) -> Codec | None:
        """The codec of the first stage, for most the only one; None if not compressed."""
        return self.stages[0].codec if self.stages else None

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of the first stage; None if not compressed."""
        return self.stages[0].exchange if self.stages else None

    @property
    def codec_text(self) -> str:
        """The codec as a spec string, or all stages of its schedule."""
        if self.schedule is None:
            return "dense"
        return str(self.schedule) if len(self.schedule.codecs) > 1 else str(self.codec)

    @property
    def exchange_text(self) -> str:
        """The exchange's name, or one for each stage of the schedule."""
        begins = self.schedule.begins if self.schedule else ()
        names = ", ".join(stage.exchange.name for stage in self.stages if stage.begin in begins) or "horovod"
        return f"{names} in {len(self.cuts)} pieces" if self.cuts else names

    def piece(self, begin: int, end: int) -> Slot:
        """A stretch of the tensor as a tensor of its own, whose residual is a view of this one's. Its step count is
        this one's, which moves with the last piece."""
        state = {name: array[begin:end] for name, array in self.state.items() if name == error_feedback.STATE}
        if "step" in self.state and end == self.spec.numel:
            state["step"] = self.state["step"]
        return Slot(_piece(self.spec, begin, end), self.schedule, self.stages, state=state)

    def received(self, stage: int, ranks: int) -> float:
        """Bytes that one rank receives (and sends) for one reduction in a stage."""
        exchange, codec = self.stages[stage].exchange, self.stages[stage].codec
        specs = [_piece(self.spec, *cut) for cut in self.cuts] or [self.spec]
        return sum(exchange.received(codec, spec, ranks) for spec in specs)

    @property
    def begins(self) -> tuple[int, ...]:
        """The first step of each stage."""
        return tuple(stage.begin for stage in self.stages)

    def stage(self, step: int) -> int:
        """Index of the stage that the reduction number ``step`` (from 0) falls in."""
        return max(bisect_right(self.begins, step) - 1, 0)

    def state_layout(self, memory: bool, ranks: int, dgc: bool = False) -> dict[str, tuple[int, str]]:
        """Name to (length, dtype) of the state arrays this tensor needs, for all of its stages."""
        codecs = [stage.codec for stage in self.stages]
        layout: dict[str, tuple[int, str]] = {}
        memory = memory and not all(codec.lossless for codec in codecs)
        if memory:
            layout[error_feedback.STATE] = (self.spec.numel, "float32")
        if dgc and codecs:
            layout[momentum.VELOCITY] = (self.spec.numel, "float32")
        if len(codecs) > 1 or any(codec.uses_step for codec in codecs):
            layout["step"] = (1, "int32")
        for stage in self.stages:
            layout |= stage.exchange.state(stage.codec, self.spec, ranks, memory)
        return layout


@dataclass(frozen=True)
class Plan:
    """The slots in the order in which the user named the tensors."""

    slots: dict[str, Slot]
    policy: Policy
    exchange: Exchanges
    seed: int
    error_feedback: bool
    ranks: int
    """How many reduce together: with another number the plan is another one."""
    dgc: bool = False
    """Whether momentum is applied before compression, see ``memory/dgc.py``."""
    verify: bool = False
    """Whether gathered payloads carry checksums."""
    delayed: bool = True
    """Whether ``sum`` may scale by what earlier steps have shown: where stages can be looked up, and what is clipped
    is kept."""
    large: int | None = None
    """Elements above which a tensor is exchanged in pieces; None for never."""

    @classmethod
    def make(cls, specs: Iterable[TensorSpec], policy: Policy, *, ranks: int, exchange: Exchanges = "auto",
             seed: int = 0, error_feedback: bool = True, dgc: bool = False, verify: bool = False, delayed: bool = True,
             large: int | None = None, refuse: Callable[[TensorSpec], str] = lambda spec: "") -> Plan:
        """Choose for every tensor. ``refuse`` gives an adapter's own reasons not to compress one."""
        slots: dict[str, Slot] = {}
        for spec in specs:
            if spec.name in slots:
                raise UsageError(f"two tensors are named {spec.name!r}; names must be unique")
            codec, reason = policy.choose(spec)
            if codec is not None and refuse(spec):
                codec, reason = None, refuse(spec)
            # An exchange that cannot carry a codec is an error here, before anything is sent.
            schedule = None if codec is None else codec if isinstance(codec, Schedule) else Schedule((0,), (codec,))
            cuts = () if dgc else _cuts(schedule, spec, large)
            stages = _stages(schedule, spec, ranks, exchange, verify, delayed and error_feedback, cuts)
            if dgc and any(isinstance(stage.exchange, Hierarchical) for stage in stages):
                raise SpecError("exchange='hierarchical': what a host sends is no rank's own, so momentum correction "
                                "cannot tell which of a rank's velocities to clear; use exchange='auto'")
            slots[spec.name] = Slot(spec, schedule, stages, reason, cuts=cuts)
        return cls(slots, policy, exchange, seed, error_feedback, ranks, dgc, verify, delayed, large)

    def for_ranks(self, ranks: int) -> Plan:
        """The plan for another number of ranks, without state."""
        def stages(slot: Slot) -> tuple[Stage, ...]:
            return _stages(slot.schedule, slot.spec, ranks, self.exchange, self.verify,
                           self.delayed and self.error_feedback, slot.cuts)

        slots = {name: Slot(slot.spec, slot.schedule, stages(slot), slot.reason, cuts=slot.cuts)
                 for name, slot in self.slots.items()}
        return replace(self, slots=slots, ranks=ranks)

    @cached_property
    def compresses(self) -> bool:
        """Whether any tensor is compressed."""
        return any(slot.codec is not None for slot in self.slots.values())

    @property
    def exchanges(self) -> list[Exchange]:
        """Those of all tensors and stages."""
        return [stage.exchange for slot in self.slots.values() for stage in slot.stages]

    def allocate(self, slot: Slot, allocate: Allocate) -> None:
        """Give a slot the state arrays it still lacks."""
        if slot.complete:
            return
        slot.complete = True
        for name, (length, dtype) in slot.state_layout(self.error_feedback, self.ranks, self.dgc).items():
            if name not in slot.state:
                slot.state[name] = allocate(name, length, dtype)

    def describe(self) -> list[Any]:
        """Everything that ranks must agree on, as JSON values: settings, then a row per tensor."""
        settings = {"version": __version__, "codec": str(self.policy), "exchange": self.exchange,
                    "min_size": self.policy.min_size, "seed": self.seed, "error_feedback": self.error_feedback,
                    "dgc": self.dgc, "verify": self.verify}
        rows = [[slot.spec.name, list(slot.spec.shape), slot.spec.dtype, slot.codec_text, slot.exchange_text]
                for slot in self.slots.values()]
        return [settings, *rows]

    def digest(self) -> bytes:
        """16 bytes that are equal exactly when :meth:`describe` is."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).digest()[:16]


def _stages(schedule: Schedule | None, spec: TensorSpec, ranks: int, exchange: Exchanges,
            verify: bool, delayed: bool, cuts: Sequence[tuple[int, int]]) -> tuple[Stage, ...]:
    """Those of the schedule; and where ``sum`` needs a bound, each is one step of asking for it, then the rest.
    Pieces have no state beside the residual."""
    if schedule is None:
        return ()
    stages: list[Stage] = []
    for begin, codec in zip(schedule.begins, schedule.codecs, strict=True):
        # Dense steps are summed whatever carries the others, which may not be able to.
        dense = codec.lossless and len(schedule.codecs) > 1
        chosen = choose(codec, _piece(spec, *cuts[0]) if cuts else spec, ranks,
                        "auto" if dense else _requested(exchange, spec))
        if cuts and isinstance(chosen, TwoStage):
            chosen = TwoStage(owner_memory=False)
        stages.append(Stage(codec, _verified(chosen) if verify else chosen, begin))
        if (delayed and not cuts and isinstance(chosen, Sum) and not codec.interactive and Sum.delays(codec, ranks)
                and begin + 1 not in schedule.begins):
            stages.append(Stage(codec, Sum(delayed=True), begin + 1))
    return tuple(stages)


def _verified(exchange: Exchange) -> Exchange:
    if isinstance(exchange, Hierarchical):  # what stays inside a host is no payload
        return replace(exchange, between=Verified(exchange.between))
    return Verified(exchange)


def _cuts(schedule: Schedule | None, spec: TensorSpec, large: int | None) -> tuple[tuple[int, int], ...]:
    """The pieces of a tensor that is large, unless its codec needs the whole (its shape, or what it has learned)."""
    if schedule is None or large is None or spec.numel <= large:
        return ()
    if any(codec.shaped or codec.lossless or codec.state(TensorSpec("", (64, 64))) for codec in schedule.codecs):
        return ()
    length = max(large // _PIECES // _MULTIPLE, 1) * _MULTIPLE
    return tuple((begin, min(begin + length, spec.numel)) for begin in range(0, spec.numel, length))


def _piece(spec: TensorSpec, begin: int, end: int) -> TensorSpec:
    return TensorSpec(f"{spec.name}[{begin}:]", (end - begin,), spec.dtype)


def _requested(exchange: Exchanges, spec: TensorSpec) -> str:
    if isinstance(exchange, str):
        return exchange
    return next((name for pattern, name in exchange.items() if fnmatch.fnmatchcase(spec.name, pattern)), "auto")


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
        for what, one, other in zip(("", "shape", "dtype", "codec", "exchange"), row, others[name], strict=True):
            if one != other:
                return f"{what} of tensor {name!r} is {one}, not {other}"
    return f"the tensors come in another order: {list(ours)}, not {list(others)}"
