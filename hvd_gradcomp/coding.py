"""Encode, decode and settle: a codec's own operations, or a native kernel that gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hvd_gradcomp import native, payload
from hvd_gradcomp.codecs import matrix
from hvd_gradcomp.codecs.base import Codec, Ctx, Received
from hvd_gradcomp.codecs.chain import Chain
from hvd_gradcomp.codecs.matrix import Product, Products
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.memory.base import Memory, NoMemory
from hvd_gradcomp.memory.dgc import MomentumCorrection
from hvd_gradcomp.memory.error_feedback import ErrorFeedback
from hvd_gradcomp.native import Host, HostParts, Kernel, Sink, Source
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.payload import Layout, Packed, Parts
from hvd_gradcomp.spec import TensorSpec

_numpy = NumpyOps()
_LARGE = 2.0**100  # see Codec.vouching


@dataclass(frozen=True)
class Sent:
    """The own payload, as it is counted: ``Received.sent`` of an exchange that sends what a codec encoded."""

    codec: Codec
    parts: Parts
    ctx: Ctx

    def __call__(self, acc: Array) -> Array:
        return decode(self.codec, self.parts, acc, self.ctx)


@dataclass(frozen=True)
class Entries:
    """What counts as sent, or arrived, as int32 indices and float32 values, added one list after the other:
    ``Received.sent`` of an exchange that deals in entries."""

    ops: Ops
    lists: Callable[[], Iterable[tuple[Array, Array]]]

    def __call__(self, acc: Array) -> Array:
        for index, values in self.lists():
            acc = self.ops.scatter_add(acc, index, values)
        return acc


def encode(codec: Codec, memory: Memory, ctx: Ctx) -> Parts:
    """The payload of what ``memory`` loads; nothing is written but the payload."""
    if type(codec) is Chain:
        return codec.code(encode(codec.first, memory, ctx), ctx,
                          lambda rest, values, inner: encode(rest, NoMemory(ctx.ops, values), inner))
    own = _tensor(codec, ctx)
    kernel = own.kernel
    if kernel is None:
        return codec.encode(memory.load(), ctx)
    ops = ctx.ops

    def run(memory: Memory, host: Ctx) -> Host:
        if not ops.in_place:  # what is returned becomes a tensor, which must not change in the next step
            blob = np.zeros(own.size, np.uint8)
            kernel.encode(_source(memory), own.unpack(blob), host)
            return blob
        if own.blob is None:
            own.blob = np.zeros(own.size, np.uint8)
            own.parts = own.unpack(own.blob)
        kernel.encode(_source(memory), own.parts, host)
        return own.blob

    if type(ops) is NumpyOps:  # there is nothing to translate
        return Packed(ops, run(memory, ctx), own.layout)
    blob = ops.host(lambda given: [run(_host_memory(memory, given), _host_ctx(ctx, given))],
                    {**_loaded(memory), **_moment(codec, ctx)}, [(own.size, "uint8")])[0]
    return Packed(ops, blob, own.layout)


def vouched(codec: Codec, parts: Parts, ctx: Ctx) -> bool:
    """Whether a payload in the host's memory shows that all that was encoded is finite."""
    return (type(ctx.ops) is NumpyOps and bool(codec.vouching)
            and all(bool(np.abs(parts[name]).max() < _LARGE) for name in codec.vouching))


def is_finite(x: Array, ctx: Ctx) -> bool:
    """Whether an array in the host's memory is known to be finite."""
    return type(ctx.ops) is NumpyOps and bool(np.isfinite(x).all())


def has_kernel(codec: Codec, spec: TensorSpec) -> bool:
    """Whether a kernel does the work of a codec, or of a chain's first, on a tensor in the host's memory."""
    return native.find(codec.first if type(codec) is Chain else codec, spec) is not None


def layout(codec: Codec, ctx: Ctx) -> Layout:
    """The codec's layout of the tensor, made once."""
    return _tensor(codec, ctx).layout


def decode(codec: Codec, parts: Parts, acc: Array, ctx: Ctx) -> Array:
    """``acc + decoded values``; ``acc`` is used up. Raises PayloadError for parts that cannot be."""
    if type(codec) is Chain:
        return decode(codec.first, codec.uncode(parts, ctx, decode), acc, ctx)
    kernel = _tensor(codec, ctx).kernel
    if kernel is None:
        return codec.decode(parts, acc, ctx)

    def run(target: Host, payloads: list[tuple[HostParts, Ctx]]) -> None:
        kernel.decode(payloads[0][0], Sink(target, None, 1.0), payloads[0][1])

    return _into(acc, run, codec, [(parts, ctx)])


def entries(codec: Codec, parts: Parts, ctx: Ctx) -> tuple[Array, Array]:
    """Places and values of a sparse codec's payload, see :meth:`Codec.entries`."""
    if type(codec) is Chain:
        return entries(codec.first, codec.uncode(parts, ctx, decode), ctx)
    own = _tensor(codec, ctx)
    kernel, values = own.kernel, parts["values"]
    if not isinstance(kernel, native.Sparse):
        return codec.entries(parts, ctx)
    places = ctx.ops.host(lambda given: [kernel.indices(_host_parts(given, "own", own), _host_ctx(ctx, given))],
                          {**_named("own", parts), **_moment(codec, ctx)}, [(int(values.shape[0]), "int32")])[0]
    return places, values


def mean(codec: Codec, payloads: Sequence[tuple[Parts, Ctx]], acc: Array) -> Array:
    """The mean over the ranks in ``acc``, which is used up: zeros, or anything where it :func:`covers` all of it.

    Args:
        payloads: each rank's payload with the ctx that it is decoded with, or the one that was summed in flight.
    """
    ctx = payloads[0][1]
    if type(codec) is Chain:
        return mean(codec.first, [(codec.uncode(parts, each, decode), each) for parts, each in payloads], acc)
    kernel = _tensor(codec, ctx).kernel
    if kernel is None:
        for parts, each in payloads:
            acc = codec.decode(parts, acc, each)
        return ctx.ops.divide(acc, ctx.ranks)
    return _into(acc, lambda target, host: kernel.mean(host, target), codec, payloads)


def covers(codec: Codec, ctx: Ctx) -> bool:
    """Whether :func:`mean` writes every element of its ``acc`` without looking at what is there."""
    kernel = None if type(codec) is Chain else _tensor(codec, ctx).kernel
    return kernel is not None and kernel.covers


def settle(received: Received, memory: Memory, ctx: Ctx, ok: Array) -> None:
    """Let ``memory`` keep what this rank's payload does not hold, if the step counts."""
    if not memory.keeps:
        return
    if received.stretches and isinstance(memory, ErrorFeedback) and ctx.ops.in_place:
        for begin, end, each in received.stretches:
            stretch = replace(ctx, spec=TensorSpec(ctx.spec.name, (end - begin,)))
            settle(Received(each, received.mean), memory.part(begin, end), stretch, ok)
        return
    sent = received.sent
    if isinstance(memory, _Keeping) and (
            (isinstance(sent, Sent) and _settle(sent, memory, ok))
            or (isinstance(sent, Product) and _settle_product(sent, memory, ok))
            or (isinstance(sent, Entries) and _settle_entries(sent, memory, ok))):
        return
    memory.settle(sent(ctx.ops.zeros((ctx.spec.numel,))), ok)


def largest(memory: Memory, ctx: Ctx) -> Array:
    """float32 ``(1,)``: the largest magnitude of what ``memory`` loads."""
    ops = ctx.ops
    if native.available() and ops.on_host and ctx.spec.numel:
        return ops.host(lambda given: [native.largest(_source(_host_memory(memory, given)))], _loaded(memory),
                        [(1, "float32")])[0]
    return ops.max_rows(ops.reshape(ops.abs(memory.load()), (1, ctx.spec.numel)))


def products(memory: Memory, ctx: Ctx) -> Products | None:
    """The products of what ``memory`` loads with thin factors, if kernels can make them without a dense sum."""
    shape = matrix.view(ctx.spec.shape)
    return _NativeProducts(memory, ctx, shape) if _has_products(ctx.ops, shape, ctx.spec.numel) else None


# -- to the kernels and back ------------------------------------------------------------------------


@dataclass
class _Tensor:
    """What stays the same from step to step for a codec on a tensor; its payload is written over in each."""

    kernel: Kernel[Any] | None
    layout: Layout
    blob: Host | None = None
    parts: HostParts = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size, self._places = payload.nbytes(self.layout), payload.places(self.layout)

    def unpack(self, blob: Host) -> HostParts:
        """The parts of a buffer, which need not be this rank's."""
        if blob is self.blob and self.parts:
            return self.parts
        if blob.dtype != np.uint8 or blob.shape != (self.size,):
            raise PayloadError(f"expected {self.size} bytes, got {blob.shape} of {blob.dtype}")
        parts = {name: blob[start:end].view(dtype) for name, start, end, dtype in self._places}
        # Kernels want their arrays aligned, as all are if the first is; a buffer in the middle of another may not be.
        return parts if parts[self._places[0][0]].flags.aligned else self.unpack(blob.copy())

    def named(self, parts: Parts) -> HostParts:
        """Parts that are numpy arrays already."""
        return self.unpack(parts.blob) if type(parts) is Packed else dict(parts)


def _tensor(codec: Codec, ctx: Ctx) -> _Tensor:
    known = ctx.buffers.get((codec, ctx.spec))
    if known is None:
        kernel = native.find(codec, ctx.spec) if ctx.ops.on_host else None
        known = ctx.buffers[codec, ctx.spec] = _Tensor(kernel, codec.layout(ctx.spec))
    return known


_Keeping = ErrorFeedback | MomentumCorrection
"""The memories whose state arrays kernels read and write."""


def _settle(sent: Sent, memory: _Keeping, ok: Array) -> bool:
    """Whether a kernel did it."""
    codec, parts, ctx = sent.codec, sent.parts, sent.ctx
    if type(codec) is Chain:
        return _settle(Sent(codec.first, codec.uncode(parts, ctx, decode), ctx), memory, ok)
    own = _tensor(codec, ctx)
    kernel = own.kernel
    if kernel is None:
        return False

    if type(ctx.ops) is NumpyOps:
        if ok[0]:
            kernel.decode(own.named(parts), _sink(memory), ctx)
        return True
    _update(lambda given, sink: kernel.decode(_host_parts(given, "own", own), sink, _host_ctx(ctx, given)), memory,
            {**_named("own", parts), **_moment(codec, ctx)}, ok)
    return True


def _update(run: Callable[[dict[str, Host], Sink], None], memory: _Keeping, arrays: Mapping[str, Array],
            ok: Array) -> None:
    """Let ``run`` write to the memory's state arrays through a sink; it is given ``arrays`` as well."""
    loaded = _loaded(memory)
    targets = {name: loaded.pop(name) for name in _STATE if name in loaded}
    memory.ops.host_update(lambda given: run(given, _sink(_host_memory(memory, given))), targets,
                           {**loaded, **arrays}, ok)


def _has_products(ops: Ops, shape: tuple[int, int], numel: int) -> bool:
    return native.available() and ops.on_host and 0 < math.prod(shape) == numel


@dataclass(frozen=True)
class _NativeProducts:
    memory: Memory
    ctx: Ctx
    shape: tuple[int, int]

    def left(self, q: Array) -> Array:
        rank, rows = int(q.shape[0]), self.shape[0]
        flat = self._run(native.left, q, rank, rows * rank)
        return self.ctx.ops.permute(self.ctx.ops.reshape(flat, (rows, rank)), (1, 0))

    def right(self, p: Array) -> Array:
        rank, columns = int(p.shape[0]), self.shape[1]
        flat = self._run(native.right, self.ctx.ops.permute(p, (1, 0)), rank, rank * columns)
        return self.ctx.ops.reshape(flat, (rank, columns))

    def _run(self, product: Callable[[Source, tuple[int, int], Host, int], Host], factor: Array, rank: int,
             length: int) -> Array:
        def run(given: dict[str, Host]) -> list[Host]:
            return [product(_source(_host_memory(self.memory, given)), self.shape, given["factor"], rank)]

        flat = self.ctx.ops.reshape(factor, (-1,))
        return self.ctx.ops.host(run, {**_loaded(self.memory), "factor": flat}, [(length, "float32")])[0]


def _settle_product(sent: Product, memory: _Keeping, ok: Array) -> bool:
    """Whether a kernel did it."""
    ops, shape = sent.ops, (int(sent.left.shape[0]), int(sent.right.shape[1]))
    if not _has_products(ops, shape, int(memory.grad.shape[0])):
        return False
    rank = int(sent.right.shape[0])

    def run(given: dict[str, Host], sink: Sink) -> None:
        native.product(sink, shape, given["left"], given["right"], rank)

    _update(run, memory, {"left": ops.reshape(sent.left, (-1,)), "right": ops.reshape(sent.right, (-1,))}, ok)
    return True


def _settle_entries(sent: Entries, memory: _Keeping, ok: Array) -> bool:
    """Whether a kernel did it."""
    ops = sent.ops
    if not (native.available() and ops.on_host and 0 < int(memory.grad.shape[0]) <= native.LONGEST):
        return False
    indices, values = (ops.concat(list(each)) for each in zip(*sent.lists(), strict=True))
    _update(lambda given, sink: native.scatter(sink, given["indices"], given["values"]), memory,
            {"indices": indices, "values": values}, ok)
    return True


def _into(acc: Array, run: Callable[[Host, list[tuple[HostParts, Ctx]]], None], codec: Codec,
          payloads: Sequence[tuple[Parts, Ctx]]) -> Array:
    """Let ``run`` add payloads to ``acc``."""
    ctx = payloads[0][1]
    known = _tensor(codec, ctx)
    if type(ctx.ops) is NumpyOps:
        run(acc, [(known.named(parts), each) for parts, each in payloads])
        return acc
    arrays = {"acc": acc, **_moment(codec, ctx)}
    for i, (parts, _) in enumerate(payloads):
        arrays |= _named(str(i), parts)

    def on_host(given: dict[str, Host]) -> list[Host]:
        target = given["acc"] if ctx.ops.in_place else given["acc"].copy()
        run(target, [(_host_parts(given, str(i), known), _host_ctx(each, given))
                     for i, (_, each) in enumerate(payloads)])
        return [target]

    return ctx.ops.host(on_host, arrays, [(ctx.spec.numel, "float32")])[0]


_STATE = ("residual", "velocity")
"""Those of :func:`_loaded` that a settled memory writes."""


def _loaded(memory: Memory) -> dict[str, Array]:
    """The arrays of a memory, for :func:`_host_memory`."""
    if not isinstance(memory, _Keeping):
        return {"grad": memory.load()}
    ops = memory.ops
    arrays = {"grad": memory.grad, "residual": memory.residual}
    if memory.loss_scale is not None:
        arrays["scale"] = _scalar(ops, memory.loss_scale)
    if isinstance(memory, MomentumCorrection):
        sgd = memory.sgd
        arrays |= {"velocity": memory.velocity, "momentum": _scalar(ops, sgd.momentum)}
        if memory.clip is not None:
            arrays["clip"] = memory.clip
        if sgd.weights is not None:
            arrays |= {"weights": sgd.weights, "decay": _scalar(ops, sgd.weight_decay)}
    return arrays


def _scalar(ops: Ops, value: Array | float) -> Array:
    if isinstance(value, (int, float)):
        return ops.constant([value], "float32")
    return ops.reshape(ops.cast(value, "float32"), (1,))


def _host_memory(memory: Memory, given: Mapping[str, Host]) -> Memory:
    """A memory of the numpy arrays that :func:`_loaded` became."""
    scale = given.get("scale")
    if isinstance(memory, ErrorFeedback):
        return ErrorFeedback(_numpy, given["grad"], given["residual"], scale)
    if isinstance(memory, MomentumCorrection):
        sgd = replace(memory.sgd, momentum=given["momentum"], weight_decay=given.get("decay", 0.0),
                      weights=given.get("weights"))
        return MomentumCorrection(_numpy, given["grad"], sgd, given["velocity"], scale, given["residual"],
                                  given.get("clip"))
    return NoMemory(_numpy, given["grad"])


def _source(memory: Memory) -> Source:
    """What a memory of numpy arrays loads."""
    if isinstance(memory, ErrorFeedback):
        return Source(memory.grad, memory.residual, _number(memory.loss_scale))
    if isinstance(memory, MomentumCorrection):
        return Source(memory.grad, memory.residual, _number(memory.loss_scale), _momentum(memory))
    return Source(memory.load(), None, 1.0)


def _sink(memory: Memory) -> Sink:
    """Where a memory of numpy arrays is settled."""
    if isinstance(memory, ErrorFeedback):
        return Sink(memory.residual, memory.grad, _number(memory.loss_scale))
    assert isinstance(memory, MomentumCorrection)
    return Sink(memory.residual, memory.grad, _number(memory.loss_scale), _momentum(memory))


def _momentum(memory: MomentumCorrection) -> Any:
    sgd = memory.sgd
    return native.momentum(memory.velocity, sgd.weights, _number(sgd.momentum), _number(sgd.weight_decay),
                           _number(memory.clip), sgd.nesterov)


def _number(value: Host | float | None) -> float:
    """A scalar, 1 for None."""
    return 1.0 if value is None else float(np.asarray(value, np.float32).reshape(1)[0])


def _moment(codec: Codec, ctx: Ctx) -> dict[str, Array]:
    """What a codec looks at beside the values."""
    arrays = {"step": ctx.state["step"]} if codec.uses_step else {}
    return arrays if ctx.bound is None else {**arrays, "bound": ctx.bound}


def _host_ctx(ctx: Ctx, given: Mapping[str, Host]) -> Ctx:
    if ctx.ops.in_place:  # its arrays can be looked at as they are
        return ctx
    return replace(ctx, ops=_numpy, state={"step": given["step"]} if "step" in given else {},
                   bound=given.get("bound"))


def _named(name: str, parts: Parts) -> dict[str, Array]:
    return {name: parts.blob} if type(parts) is Packed else {f"{name}/{part}": x for part, x in parts.items()}


def _host_parts(given: Mapping[str, Host], name: str, own: _Tensor) -> HostParts:
    if name in given:
        return own.unpack(given[name])
    return {part.name: given[f"{name}/{part.name}"] for part in own.layout}
