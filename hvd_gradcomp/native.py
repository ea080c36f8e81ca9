"""The codecs that have kernels: what each hands to them. Everything here is numpy, on the host.

A kernel gives the same bytes as the codec's own operations; where it does not know a setting,
:func:`find` says None and the codec's own operations do the work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from hvd_gradcomp import kernels
from hvd_gradcomp.codecs import log
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.codecs.cast import Bf16, Fp16
from hvd_gradcomp.codecs.log import Log
from hvd_gradcomp.codecs.natural import Natural
from hvd_gradcomp.codecs.qsgd import Qsgd
from hvd_gradcomp.codecs.randomk import RandomK
from hvd_gradcomp.codecs.sign import Sign
from hvd_gradcomp.codecs.ternary import Ternary
from hvd_gradcomp.codecs.topk import TopK, kept
from hvd_gradcomp.codecs.uniform import Uniform
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops import rng
from hvd_gradcomp.spec import TensorSpec

Host = np.ndarray[Any, Any]
HostParts = dict[str, Host]
C = TypeVar("C", bound=Codec)
LONGEST = 2**31 - 1
"""Elements of a tensor that can be counted with: indices are int32."""


class Source(NamedTuple):
    """What is compressed: ``grad + residual * scale``, or what DGC's momentum makes of both."""

    grad: Host
    residual: Host | None
    scale: float
    momentum: Any = None
    """The compiled object, see :func:`momentum`."""


class Sink(NamedTuple):
    """Where decoded values go: added to ``target``, then divided by ``scale``; or, with ``grad``, subtracted from
    ``grad + target * scale`` and the rest, divided by ``scale``, kept in ``target``; with ``momentum`` likewise, and
    its velocity becomes 0 where something was sent."""

    target: Host
    grad: Host | None
    scale: float
    momentum: Any = None


@dataclass(frozen=True)
class Kernel(ABC, Generic[C]):
    """One codec on one tensor. ``ctx`` is that of the numpy operations."""

    module: Any
    codec: C
    n: int
    """Elements of the tensor."""
    covers: ClassVar[bool] = False
    """Whether :meth:`mean` writes over ``acc``, whatever it holds."""

    def fits(self) -> bool:
        """Whether the kernels know the codec's settings on this tensor."""
        return True

    @abstractmethod
    def encode(self, source: Source, parts: HostParts, ctx: Ctx) -> None:
        """Write the payload into ``parts``."""

    @abstractmethod
    def decode(self, parts: HostParts, sink: Sink, ctx: Ctx) -> None:
        """Hand the payload's values to ``sink``. Raises PayloadError before anything is written."""

    def mean(self, payloads: Sequence[tuple[HostParts, Ctx]], acc: Host) -> None:
        """Add the mean of payloads, of which each rank sent one, to zeros (or see ``covers``); of one, of what was
        summed in flight."""
        for i, (parts, ctx) in enumerate(payloads):
            divisor = ctx.ranks if i == len(payloads) - 1 else 1
            self.decode(parts, Sink(acc, None, float(divisor)), ctx)


class _Tiled(Kernel[C]):
    """A codec whose kernel works tile by tile: one object around the parts does both ways."""

    covers = True

    @abstractmethod
    def bound(self, parts: HostParts, ctx: Ctx) -> Any:
        """The compiled object."""

    def encode(self, source: Source, parts: HostParts, ctx: Ctx) -> None:
        self.bound(parts, ctx).encode(*source, kernels.threads())

    def decode(self, parts: HostParts, sink: Sink, ctx: Ctx) -> None:
        self.bound(parts, ctx).decode(*sink, kernels.threads())

    def mean(self, payloads: Sequence[tuple[HostParts, Ctx]], acc: Host) -> None:
        first, *others = [self.bound(parts, ctx) for parts, ctx in payloads]
        first.mean(others, acc, float(payloads[0][1].ranks), kernels.threads())


class _Blocked(_Tiled[C]):
    """One with a setting ``block``. Sums over a block take one that fits a tile."""

    sums = True

    def fits(self) -> bool:
        return (self.block % 8 == 0 or self.block >= self.n) and (not self.sums or self.block <= self.module.TILE)

    @cached_property
    def block(self) -> int:
        """Elements of a block."""
        return getattr(self.codec, "block", None) or self.n


def _keys(ctx: Ctx, rank: int | None = None) -> tuple[int, int]:
    return rng.keys(seed=ctx.seed, spec=ctx.spec, step=int(ctx.state["step"][0]),
                    rank=ctx.rank if rank is None else rank)


class _Uniform(_Blocked[Uniform]):
    sums = False

    def bound(self, parts: HostParts, ctx: Ctx) -> Any:
        stochastic = self.codec.stochastic
        return self.module.Uniform(self.n, self.block, parts["step"], parts.get("low"),
                                   parts["codes"], self.codec.bits, stochastic, *(_keys(ctx) if stochastic else (0, 0)))


class _Log(_Blocked[Log]):
    sums = False

    def bound(self, parts: HostParts, ctx: Ctx) -> Any:
        return self.module.Log(self.n, self.block, parts["scale"], parts["codes"], self.codec.bits,
                               *_log_tables(self.codec.bits, self.codec.delta))


@lru_cache(maxsize=16)
def _log_tables(bits: int, delta: float) -> tuple[Any, ...]:
    """``(values, steps, shift, lowest)``, see ``scalar.h``."""
    middles = np.array([(low + high) / 2 for low, high in pairwise(log.levels(bits, delta))], np.float32).view(np.int32)
    shift = 23
    while np.unique(middles >> shift).size < middles.size:  # a key of its own for each
        shift -= 1
    keys = middles >> shift
    lowest = int(keys[0]) - 1
    steps = np.searchsorted(keys, np.arange(lowest, (0x3F800000 >> shift) + 1)).astype(np.uint32) << shift
    steps[keys - lowest] += ((1 << shift) - (middles & ((1 << shift) - 1))).astype(np.uint32)
    return np.array(log.decoded(bits, delta), np.float32), steps, shift, lowest


class _Sign(_Blocked[Sign]):
    def bound(self, parts: HostParts, ctx: Ctx) -> Any:
        return self.module.Sign(self.n, self.block, parts["scale"], parts["signs"])


class _Ternary(_Blocked[Ternary]):
    def bound(self, parts: HostParts, ctx: Ctx) -> Any:
        return self.module.Ternary(self.n, self.block, parts["scale"], parts["digits"],
                                   ctx.error_feedback, *_keys(ctx))


class _Qsgd(_Blocked[Qsgd]):
    def bound(self, parts: HostParts, ctx: Ctx) -> Any:
        return self.module.Qsgd(self.n, self.block, parts["step"], parts["codes"],
                                self.codec.levels, ctx.error_feedback, *_keys(ctx))


class _Natural(_Tiled[Natural]):
    def bound(self, parts: HostParts, ctx: Ctx) -> Any:
        return self.module.Natural(self.n, parts["codes"], parts["base"], *_keys(ctx))


class _Bf16(_Tiled[Bf16]):
    def bound(self, parts: HostParts, ctx: Ctx) -> Any:
        return self.module.Bf16(self.n, parts["values"])


class _Fp16(_Tiled[Fp16]):
    def bound(self, parts: HostParts, ctx: Ctx) -> Any:
        return self.module.Fp16(self.n, parts["values"].view(np.uint16), float(self.codec.scale(ctx)[0]),
                                self.codec.limit(ctx))


class Sparse(Kernel[C]):
    """Values at indices."""

    def fits(self) -> bool:
        return self.n <= LONGEST

    @abstractmethod
    def indices(self, parts: HostParts, ctx: Ctx) -> Host:
        """int32 ``[k]`` of a payload, checked or about to be."""

    def by(self, ctx: Ctx) -> float:
        """What values are multiplied by."""
        return 1.0

    def decode(self, parts: HostParts, sink: Sink, ctx: Ctx) -> None:
        try:
            self.module.scatter(*sink, self.indices(parts, ctx), parts["values"], self.by(ctx), kernels.threads())
        except IndexError as error:
            raise PayloadError(str(error)) from None

    def mean(self, payloads: Sequence[tuple[HostParts, Ctx]], acc: Host) -> None:
        where = []
        for parts, ctx in payloads:
            where.append(self.indices(parts, ctx))
            try:
                self.module.scatter(acc, None, 1.0, None, where[-1], parts["values"], self.by(ctx), 1)
            except IndexError as error:
                raise PayloadError(str(error)) from None
        if payloads[0][1].ranks > 1:  # the others are zeros: only where something was sent there is to divide
            self.module.divide_at(acc, where, float(payloads[0][1].ranks))


class _TopK(Sparse[TopK]):
    def fits(self) -> bool:
        return self.codec.threshold == "exact" and super().fits()

    def encode(self, source: Source, parts: HostParts, ctx: Ctx) -> None:
        plain = self.codec.index == "plain"
        chosen = parts["indices"] if plain else np.empty(parts["values"].size, np.int32)
        self.module.select(*source, chosen, kernels.threads())
        self.module.gather(*source, chosen, parts["values"])
        if not plain:
            self.module.encode_indices(chosen, self.n, parts["index_high"], parts.get("index_low"))

    def indices(self, parts: HostParts, ctx: Ctx) -> Host:
        if self.codec.index == "plain":
            return parts["indices"]
        try:
            return self.module.decode_indices(parts["index_high"], parts.get("index_low"), self.n,
                                              parts["values"].size)
        except IndexError as error:
            raise PayloadError(str(error)) from None


class _RandomK(Sparse[RandomK]):
    def encode(self, source: Source, parts: HostParts, ctx: Ctx) -> None:
        self.module.gather(*source, self.indices(parts, ctx), parts["values"])

    def indices(self, parts: HostParts, ctx: Ctx) -> Host:
        rank = rng.SHARED if self.codec.shared else None
        return self.module.sample(self.n, kept(self.codec.ratio, self.n), *_keys(ctx, rank))

    def by(self, ctx: Ctx) -> float:
        return 1.0 if ctx.error_feedback else self.n / kept(self.codec.ratio, self.n)


_KERNELS: dict[type[Codec], Callable[[Any, Any, int], Kernel[Any]]] = {
    Uniform: _Uniform, Log: _Log, Sign: _Sign, Ternary: _Ternary, Qsgd: _Qsgd, Natural: _Natural, Bf16: _Bf16,
    Fp16: _Fp16, TopK: _TopK, RandomK: _RandomK}


def available() -> bool:
    """Whether there are kernels at all."""
    return kernels.load()[0] is not None


@lru_cache(maxsize=4096)
def find(codec: Codec, spec: TensorSpec) -> Kernel[Any] | None:
    """The kernel for a codec on a tensor, or None."""
    module, _ = kernels.load()
    if module is None or type(codec) not in _KERNELS or spec.numel == 0:
        return None
    kernel = _KERNELS[type(codec)](module, codec, spec.numel)
    return kernel if kernel.fits() else None


def momentum(velocity: Host, weights: Host | None, factor: float, decay: float, clip: float, nesterov: bool) -> Any:
    """What a Source or Sink takes as ``momentum``, see ``memory/dgc.py``."""
    return kernels.load()[0].Momentum(velocity, weights, factor, decay, clip, nesterov)


def left(source: Source, shape: tuple[int, int], q: Host, rank: int) -> Host:
    """``M q^T``, ``[rows * rank]``, for ``q`` ``[rank * columns]``."""
    out = np.empty(shape[0] * rank, np.float32)
    kernels.load()[0].rows_times(*source, *shape, np.ascontiguousarray(q), rank, out, kernels.threads())
    return out


def right(source: Source, shape: tuple[int, int], p: Host, rank: int) -> Host:
    """``p^T M``, ``[rank * columns]``, for ``p`` ``[rows * rank]``."""
    out = np.empty(rank * shape[1], np.float32)
    kernels.load()[0].columns_times(*source, *shape, np.ascontiguousarray(p), rank, out)
    return out


def product(sink: Sink, shape: tuple[int, int], left: Host, right: Host, rank: int) -> None:
    """Sink ``left right``, ``[rows * rank]`` times ``[rank * columns]``."""
    kernels.load()[0].product(*sink, *shape, np.ascontiguousarray(left), np.ascontiguousarray(right), rank,
                              kernels.threads())


def scatter(sink: Sink, indices: Host, values: Host) -> None:
    """Sink ``values`` at int32 ``indices``, which may come in any order and more than once. Raises PayloadError for
    one outside."""
    try:
        kernels.load()[0].scatter(*sink, indices, values, 1.0, kernels.threads())
    except IndexError as error:
        raise PayloadError(str(error)) from None


def largest(source: Source) -> Host:
    """float32 ``(1,)``: the largest magnitude; NaN if there is one."""
    module, _ = kernels.load()
    return np.array([module.largest(*source)], np.float32)
