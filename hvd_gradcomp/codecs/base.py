"""What a codec is: a frozen configuration with a layout, ``encode`` and ``decode``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.payload import Layout, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Claims:
    """What a codec promises; the contract suite holds it to each one.

    lossless: decode gives the very bits of a float32 input.
    unbiased: over the draws of its randomness the mean of the decodes is the input.
    contraction: ``|x - decode(encode(x))| < |x|`` in the L2 norm for every x that is not zero, so
        error feedback converges with it.
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


@dataclass(frozen=True)
class Codec(ABC):
    """Base of all codecs. Holds configuration only; state goes in and comes out as arrays.

    ``encode`` and ``decode`` trace in ``tf.function`` and never make a device wait: they use the
    operations of ``ctx.ops`` and do not branch on values.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    claims: ClassVar[Claims] = Claims()
    coded: ClassVar[tuple[str, ...]] = ()
    """float32 parts of the payload that a following codec (``A + B``) may encode in turn."""
    uses_step: ClassVar[bool] = False
    uses_bound: ClassVar[bool] = False

    @property
    def lossless(self) -> bool:
        return self.claims.lossless

    @property
    def summable(self) -> bool:
        return self.claims.summable

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


def is_int(value: Any, low: int, high: int | None = None) -> bool:
    """Whether an argument is a whole number (True and False are not) in ``low .. high``."""
    return type(value) is int and value >= low and (high is None or value <= high)


def is_number(value: Any) -> bool:
    return type(value) in (int, float)
