"""What a codec is: a frozen configuration with a layout, ``encode`` and ``decode``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from hvd_gradcomp.codecs.matrix import Products
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.payload import Layout, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Claims:
    """What a codec promises; the contract suite holds it to each one.

    lossless: decode gives every float32 back (a -0.0 as 0.0).
    unbiased: over the draws of its randomness the mean of the decodes is the input.
    contraction: ``|x - decode(encode(x))| < |x|`` in the L2 norm for every x that is not zero (nor
        below the magnitudes that the codec takes as 0), so error feedback converges with it.
    summable: payloads of all ranks may be added in flight and decoded once.
    """

    lossless: bool = False
    unbiased: bool = False
    contraction: bool = True
    summable: bool = False


@dataclass(frozen=True)
class Ctx:
    """Everything beside the values that encode and decode may look at."""

    ops: Ops
    spec: TensorSpec
    ranks: int
    rank: int
    seed: int
    state: Mapping[str, Array] = field(default_factory=dict)
    """The tensor's state arrays, to be read only: the codec's own (:meth:`Codec.state`) and, if it
    ``uses_step``, ``step``, int32 ``(1,)``: committed steps so far."""
    bound: Array | None = None
    """float32 ``(1,)``: largest magnitude on any rank; there if the codec ``uses_bound``."""
    error_feedback: bool = True
    products: Products | None = None
    """Of what :meth:`Codec.rounds` is to reduce, where they can be had without loading it."""
    buffers: dict[Any, Any] = field(default_factory=dict)
    """Payloads that are written anew in each step, by whom they belong to: the tensor's own, if it has any."""

    def of(self, rank: int) -> Ctx:
        """The same on another rank, for decoding what that one sent."""
        if rank == self.rank:
            return self
        other = object.__new__(Ctx)
        other.__dict__.update(self.__dict__, rank=rank)
        return other


@dataclass(frozen=True)
class Received:
    """What came back, not yet decoded: the residual is settled first, from the gradient's own
    storage, before the mean may be written there.

    sent: ``sent(acc)`` adds what this rank's payload is counted as.
    mean: ``mean(acc)`` adds the mean of what all ranks' payloads are counted as; ``acc`` is zeros, or anything if
        the mean ``covers`` it.
    covers: whether ``mean`` writes every element without looking at what is there.
    state: new values of the codec's state arrays.
    stretches: ``sent`` cut up: begin, end, and what adds the values of that stretch. For settling one
        after the other, without a dense vector of them all.
    """

    sent: Callable[[Array], Array]
    mean: Callable[[Array], Array]
    state: Callable[[], dict[str, Array]] = dict
    stretches: Sequence[tuple[int, int, Callable[[Array], Array]]] = ()
    covers: bool = False


Answer = tuple[Parts, list[Parts]]
"""What came of one round: the own payload as it is counted, and payloads whose sum is the sum over
ranks (one that was added in flight, or one of each rank)."""


@dataclass(frozen=True)
class Codec(ABC):
    """Base of all codecs. Holds configuration only; state goes in and comes out as arrays.

    ``encode`` and ``decode`` trace in ``tf.function`` and never make a device wait: they use the
    operations of ``ctx.ops`` and do not branch on values.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    use: ClassVar[str] = ""
    """One short line: what it is good for."""
    claims: ClassVar[Claims] = Claims()
    coded: ClassVar[tuple[str, ...]] = ()
    """float32 parts of the payload that a following codec (``A + B``) may encode in turn."""
    uses_step: ClassVar[bool] = False
    uses_bound: ClassVar[bool] = False
    shaped: ClassVar[bool] = False
    """Whether it makes use of the tensor's shape, which a chunk of it has no more."""
    sparse: ClassVar[bool] = False
    """Whether a payload is places and values of its choice, which :meth:`entries` gives."""
    vouching: ClassVar[tuple[str, ...]] = ()
    """float32 parts of the payload that are below 2**100 in magnitude only if all that was encoded is finite."""
    interactive: ClassVar[bool] = False
    """Whether exchanges are to run :meth:`rounds` in place of ``encode`` and ``decode``: for a codec
    whose ranks agree on something on the way."""

    @property
    def lossless(self) -> bool:
        return self.claims.lossless

    @property
    def summable(self) -> bool:
        return self.claims.summable

    @property
    def summable_rounds(self) -> bool:
        """Whether what travels, in every round if there are several, may be added in flight."""
        return self.summable

    headroom: ClassVar[float] = 1.0
    """By how much a bound of an earlier step is raised, which costs no precision up to here (``uses_bound``)."""

    def summed(self, ranks: int) -> Codec | None:
        """What is sent in its place where payloads of ``ranks`` are added in flight: itself if they may be; None if
        there is nothing."""
        return self if self.summable_rounds else None

    @abstractmethod
    def layout(self, spec: TensorSpec) -> Layout:
        """The parts of the payload of one tensor; a function of shape and configuration alone."""

    @abstractmethod
    def encode(self, x: Array, ctx: Ctx) -> Parts:
        """The payload of ``x``, float32 ``[numel]``, with exactly the parts of :meth:`layout`."""

    @abstractmethod
    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        """``acc + decoded values``, float32 ``[numel]``; ``acc`` is used up. Raises PayloadError
        for parts that :meth:`encode` cannot have made, before memory is touched."""

    def entries(self, parts: Parts, ctx: Ctx) -> tuple[Array, Array]:
        """What a ``sparse`` codec's payload holds: places, int32 ``[k]``, all different, which are not
        trusted, and values, float32 ``[k]``."""
        raise NotImplementedError

    # -- state ----------------------------------------------------------------------------------

    def state(self, spec: TensorSpec) -> dict[str, tuple[int, str]]:
        """Name to (length, dtype) of the state arrays that the codec wants kept between steps.
        They start as zeros. None by default; the step count needs only ``uses_step``."""
        return {}

    def advance(self, received: Parts, ctx: Ctx) -> dict[str, Array]:
        """New values of :meth:`state`, stored if the step counts, from what came back from the
        exchange (the same on every rank): the payload's sum under ``sum``, each part of all ranks'
        payloads as ``[ranks, length]`` under ``gather``."""
        return {}

    # -- rounds ---------------------------------------------------------------------------------

    def rounds(self, load: Callable[[], Array], ctx: Ctx) -> Generator[Parts, Answer, Received]:
        """Reduce ``load()``, float32 ``[numel]``, in any fixed number of rounds: each ``yield`` of parts, sized as in
        :meth:`round_layouts`, is resumed with its :data:`Answer`. Here: one round of a summable payload."""
        own, received = yield self.encode(load(), ctx)
        total = add(received)
        return Received(sent=lambda acc: self.decode(own, acc, ctx),
                        mean=lambda acc: ctx.ops.divide(self.decode(total, acc, ctx), ctx.ranks),
                        state=lambda: self.advance(total, ctx))

    def round_layouts(self, spec: TensorSpec) -> list[Layout]:
        """The parts of each round."""
        return [self.layout(spec)]

    # -- configuration --------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Name and arguments as plain JSON values; ``registry.from_config`` is the way back."""
        return {"codec": self.name, **{f.name: getattr(self, f.name) for f in fields(self)}}

    def __str__(self) -> str:
        """The spec string: the first argument always, the others where they are not the default."""
        shown = [f"{f.name}={getattr(self, f.name)!r}" for i, f in enumerate(fields(self))
                 if i == 0 or f.default is MISSING or getattr(self, f.name) != f.default]
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def _require(self, condition: bool, argument: str, must: str) -> None:
        """Raise SpecError unless ``condition``: ``argument`` must be ``must``."""
        if not condition:
            raise SpecError(f"{self.name}: {argument} must be {must}, not {getattr(self, argument)!r}")


def add(payloads: list[Parts]) -> Parts:
    """The sum of payloads, part by part, in the order given."""
    total: dict[str, Array] = dict(payloads[0])
    for each in payloads[1:]:
        total = {name: total[name] + each[name] for name in total}
    return total


def is_int(value: Any, low: int, high: int | None = None) -> bool:
    """Whether an argument is a whole number (True and False are not) in ``low .. high``."""
    return type(value) is int and value >= low and (high is None or value <= high)


def is_number(value: Any) -> bool:
    return type(value) in (int, float)
