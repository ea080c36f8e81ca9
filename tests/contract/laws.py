"""The laws of every codec, as functions that raise AssertionError when one is broken.

``test_laws.py`` holds every registered codec to them, ``test_broken.py`` shows that each law
rejects a codec made to break it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_gradcomp import payload, stats
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.codecs.registry import from_config
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.exchange import choose
from hvd_gradcomp.exchange.two_stage import OWNER, bounds
from hvd_gradcomp.memory.error_feedback import STATE as RESIDUAL
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.plan import Slot
from hvd_gradcomp.spec import TensorSpec, parse
from tests.contract import values
from tests.contract.backends import NUMPY, TENSORFLOW_GRAPH, Backend
from tests.contract.specs import exact
from tests.contract.values import Floats, Grads

Bytes = NDArray[np.uint8]
Shapes = dict[str, tuple[int, ...]]

SHAPES: Shapes = {"weight": (33, 31), "bias": (9,), "small": (3,)}
MIN_SIZE = 4
"""Leaves ``small`` uncompressed, so that every world has such a tensor too."""

_FLOAT32, _FLOAT16 = 2.0**-24, 2.0**-11
"""Largest relative errors of one rounding."""


# -- one codec, one tensor, no exchange ---------------------------------------------------------------------------


class Single:
    """A codec for tensors of one shape in one framework, its state as at the start."""

    def __init__(self, codec: Codec, n: int, backend: Backend = NUMPY, *, rank: int = 0, ranks: int = 1,
                 seed: int = 0, error_feedback: bool = True) -> None:
        self.codec, self.backend = codec, backend
        self.spec = TensorSpec("tensor", (n,))
        self.layout = codec.layout(self.spec)
        self._context = (ranks, rank, seed, error_feedback)
        self._encode = backend.compiled(self._encode_arrays)
        self._decode = backend.compiled(self._decode_arrays)

    def parts(self, x: Floats, step: int = 0) -> payload.Parts:
        """What the codec itself makes of ``x``."""
        array = self.backend.array(x)
        return self.codec.encode(array, self._ctx(array, self.backend.array(np.array([step], np.int32))))

    def encode(self, x: Floats, step: int = 0) -> Bytes:
        """The packed payload of ``x``."""
        return self.backend.numpy(self._encode(self.backend.array(x), self._step(step)))

    def decode(self, blob: Bytes, x: Floats, step: int = 0) -> Floats:
        """What a payload stands for; ``x`` only gives the bound that some codecs exchange beside it."""
        arrays = self.backend.array(blob), self.backend.array(x), self._step(step)
        return self.backend.numpy(self._decode(*arrays)).copy()

    def send(self, x: Floats, step: int = 0) -> Floats:
        """What arrives of ``x``."""
        return self.decode(self.encode(x, step), x, step)

    def _step(self, step: int) -> Array:
        return self.backend.array(np.array([step], np.int32))

    def _encode_arrays(self, x: Array, step: Array) -> Array:
        return payload.pack(self.backend.ops, self.codec.encode(x, self._ctx(x, step)), self.layout)

    def _decode_arrays(self, blob: Array, x: Array, step: Array) -> Array:
        ops = self.backend.ops
        parts = payload.unpack(ops, blob, self.layout)
        return self.codec.decode(parts, ops.zeros((self.spec.numel,)), self._ctx(x, step))

    def _ctx(self, x: Array, step: Array) -> Ctx:
        ops, (ranks, rank, seed, error_feedback) = self.backend.ops, self._context
        state = {name: ops.zeros((length,), dtype) for name, (length, dtype) in self.codec.state(self.spec).items()}
        bound = ops.max_rows(ops.reshape(ops.abs(x), (1, self.spec.numel))) if self.codec.uses_bound else None
        return Ctx(ops, self.spec, ranks, rank, seed, {**state, "step": step}, bound, error_feedback)


def layout_is_fixed(codec: Codec) -> None:
    """The payload's parts have the lengths and dtypes of ``layout``: whatever the values, rank, step
    and seed; ``layout`` knows only the shape."""
    for n in (1, 7, 41, 1025):
        layouts = {codec.layout(TensorSpec(name, (n,))) for name in ("one", "another")}
        assert len(layouts) == 1, f"the layout depends on the tensor's name: {layouts}"
        layout = next(iter(layouts))
        inputs = {**values.odd(n), "normal": values.normal("layout", (n,)),
                  "not a number": np.full(n, np.nan, np.float32), "infinite": np.full(n, -np.inf, np.float32)}
        for ranks, rank, seed, step in ((1, 0, 0, 0), (3, 2, 1 << 40, 7)):
            single = Single(codec, n, rank=rank, ranks=ranks, seed=seed)
            for name, x in inputs.items():
                with np.errstate(all="ignore"):
                    parts = single.parts(x, step)
                made = {part: (array.shape, str(array.dtype)) for part, array in parts.items()}
                said = {part.name: ((part.length,), part.dtype) for part in layout}
                assert made == said, f"{name} of {n} on rank {rank} of {ranks} gave {made}, the layout says {said}"


def encode_only_reads(codec: Codec, backend: Backend) -> None:
    """Encoding leaves the gradient and the state as they are."""
    x = values.normal("reads", (41,))
    single = Single(codec, 41, backend)
    array, step = backend.array(x), backend.array(np.array([3], np.int32))
    ctx = single._ctx(array, step)
    before = {name: backend.numpy(state).tobytes() for name, state in ctx.state.items()}
    codec.encode(array, ctx)
    assert backend.numpy(array).tobytes() == x.tobytes(), "encode changed its input"
    after = {name: backend.numpy(state).tobytes() for name, state in ctx.state.items()}
    assert after == before, "encode changed the state"


def is_lossless(codec: Codec) -> None:
    """What arrives is what was sent (a -0.0 may arrive as 0.0)."""
    for n in (1, 41, 1025):
        for name, x in {**values.odd(n), "normal": values.normal("lossless", (n,))}.items():
            assert np.array_equal(Single(codec, n).send(x), x), f"{name} of {n} arrived changed"


def is_unbiased(codec: Codec, x: Floats, count: int = 2000) -> None:
    """The mean of what arrives is ``x`` within 5 standard errors, for every different value in ``x``."""
    sent = draws(codec, x, count)
    jump = np.abs(sent - x).max()
    for value in np.unique(x):
        arrived = sent[:, x == value]
        error = abs(arrived.mean() - value)
        # Of something that happens rarely nothing may be seen, and then no spread either: 15 times in
        # all are expected to be seen at least once, for sure.
        allowed = 5 * arrived.std() / np.sqrt(arrived.size) + 15 * jump / arrived.size + 1e-6 * np.abs(x).max()
        assert error <= allowed, f"{value}: mean off by {error}, allowed {allowed}"


def is_silent_on_grid(codec: Codec, grid: Floats, count: int = 200) -> None:
    """Values that the codec can represent arrive as they are, in every draw."""
    sent = draws(codec, grid, count)
    moved = np.flatnonzero((sent != grid).any(axis=0))
    assert not moved.size, f"elements {moved[:5]} moved from {grid[moved[:5]]} to {sent[:, moved[:5]]}"


def draws(codec: Codec, x: Floats, count: int) -> NDArray[np.float64]:
    """What arrives of ``x``, ``[count, n]``, at different steps and from different ranks, without error feedback."""
    singles = [Single(codec, x.size, rank=rank, ranks=4, error_feedback=False) for rank in range(4)]
    return np.array([singles[i % 4].send(x, step=i // 4) for i in range(count)], np.float64)


def contracts(codec: Codec) -> None:
    """``|x - sent| < |x|`` for vectors of magnitude around 1, among them the worst for rounding."""
    for n in (1, 2, 41, 1024, 3000):
        small = np.full(n, 1e-3, np.float32)
        small[:1], small[-1:] = -1.0, 1.0
        one_hot = np.zeros(n, np.float32)
        one_hot[n // 2] = -2.0
        inputs = {"normal": values.normal("contracts", (n,)), "constant": np.full(n, 3.0, np.float32),
                  "small between extremes": small, "one hot": one_hot,
                  "heavy tailed": values.normal("heavy", (n,)) ** 5,
                  "all of one sign": np.abs(values.normal("positive", (n,))) + np.float32(5.0)}
        for name, x in inputs.items():
            error = np.linalg.norm(x.astype(np.float64) - Single(codec, n).send(x))
            norm = np.linalg.norm(x.astype(np.float64))
            assert error < norm, f"{name} of {n}: |x - sent| = {error} is not below |x| = {norm}"


def may_be_summed(codec: Codec, ranks: int) -> None:
    """Decoding the sum of all payloads gives the sum of what they stand for."""
    n = 41
    bound = np.array([4.0], np.float32)
    spec = TensorSpec("tensor", (n,))
    xs = [np.clip(grads["x"], -4, 4) for grads in values.gradients(0, ranks, {"x": (n,)})]
    state = {name: np.zeros(length, dtype) for name, (length, dtype) in codec.state(spec).items()}
    ctxs = [Ctx(NUMPY.ops, spec, ranks, rank, 0, {**state, "step": np.zeros(1, np.int32)}, bound)
            for rank in range(ranks)]
    payloads = [codec.encode(x, ctx) for x, ctx in zip(xs, ctxs, strict=True)]
    sent = [codec.decode(dict(parts), np.zeros(n, np.float32), ctx) for parts, ctx in zip(payloads, ctxs, strict=True)]
    total = {name: sum((parts[name] for parts in payloads[1:]), start=payloads[0][name].copy()) for name in payloads[0]}
    got = codec.decode(total, np.zeros(n, np.float32), ctxs[-1])
    magnitude = np.abs(np.array(sent, np.float64)).sum(axis=0)
    allowed = _allowed(codec, ranks, "sum", magnitude, magnitude)
    error = np.abs(got - np.array(sent, np.float64).sum(axis=0))
    assert (error <= allowed).all(), f"decoded sum is off by {error.max()}, allowed {allowed[error.argmax()]}"


def round_trips(codec: Codec) -> None:
    """The configuration survives JSON, and the printed spec parses to the same codec."""
    text = json.dumps(codec.config())
    assert from_config(json.loads(text)) == codec, f"{text} gives {from_config(json.loads(text))}"
    assert parse(str(codec)) == codec, f"{codec} parses to {parse(str(codec))}"
    assert str(parse(str(codec))) == str(codec)
    assert hash(codec) == hash(parse(str(codec)))


def same_in_every_framework(codec: Codec, backend: Backend, inputs: dict[str, Floats]) -> None:
    """A framework makes the payload bytes that numpy makes, reads them alike, and keeps the same residual.

    inputs: by name, all of one length.
    """
    n = len(next(iter(inputs.values())))
    reference, other = (Single(codec, n, each, rank=1, ranks=3, seed=5) for each in (NUMPY, backend))
    for name, x in inputs.items():
        expected, got = reference.encode(x, 2), other.encode(x, 2)
        if exact(codec):
            different = np.flatnonzero(expected != got)
            assert not different.size, f"{name}: {backend} encodes byte {different[0]} of {expected.size} differently"
        sent, arrived = reference.decode(expected, x, 2), other.decode(expected, x, 2)
        _same_values(codec, f"{name}: {backend} decodes", sent, arrived, x)
        with np.errstate(over="ignore"):
            residual = backend.numpy(backend.array(x) - backend.array(arrived))
            _same_values(codec, f"{name}: {backend} keeps", x - sent, residual, x)


def _same_values(codec: Codec, what: str, expected: Floats, got: Floats, scale: Floats) -> None:
    """Equal up to denormals; where bytes need not be the same, to 1e-5 of the largest in ``scale``."""
    expected, got = values.flush(expected), values.flush(got)
    if exact(codec):
        wrong = np.flatnonzero(expected != got)
        assert not wrong.size, f"{what} element {wrong[0]} as {got[wrong[0]]!r}, not {expected[wrong[0]]!r}"
    else:
        error, allowed = np.abs(expected - got).max(), 1e-5 * np.abs(scale).max() + 1e-30
        assert error <= allowed, f"{what} values that are off by {error}, allowed {allowed}"


def refuses_outside_indices(codec: Codec, backend: Backend, error: type[Exception] = PayloadError) -> None:
    """An index outside the tensor is an error, not a write beside it."""
    n = 41
    single = Single(codec, n, backend)
    x = values.normal("hostile", (n,))
    ctx = single._ctx(backend.array(x), backend.array(np.zeros(1, np.int32)))
    parts = single.parts(x)
    indices = next(name for name in parts if name.split("/")[-1] == "indices")
    for outside in (-1, n, 2**31 - 1, -(2**31)):
        bad = backend.numpy(parts[indices]).copy()
        bad[-1] = outside
        hostile = {**parts, indices: backend.array(bad)}
        try:
            codec.decode(hostile, backend.ops.zeros((n,)), ctx)
        except error:
            continue
        raise AssertionError(f"index {outside} of {n} was accepted")


def survives_any_bytes(codec: Codec, backend: Backend, errors: tuple[type[Exception], ...] = (PayloadError,)) -> None:
    """Bytes that no encoder made either decode to some vector or are refused."""
    n = 41
    single = Single(codec, n, backend)
    nbytes = payload.nbytes(single.layout)
    blobs = [np.zeros(nbytes, np.uint8), np.full(nbytes, 255, np.uint8)]
    blobs += [np.random.default_rng(i).integers(0, 256, nbytes).astype(np.uint8) for i in range(20)]
    x = values.normal("any bytes", (n,))
    for blob in blobs:
        with np.errstate(all="ignore"):
            try:
                result = single.decode(blob, x)
            except errors:
                continue
            except Exception as error:
                raise AssertionError(f"hostile bytes ended in {error!r}") from error
        assert result.shape == (n,) and result.dtype == np.float32, f"decoded to {result.dtype}{result.shape}"
    for wrong in (nbytes - 1, nbytes + 1, nbytes + 4, 0):
        try:
            single.decode(np.zeros(wrong, np.uint8), x)
        except PayloadError:
            continue
        raise AssertionError(f"a payload of {wrong} bytes in place of {nbytes} was accepted")


# -- a codec in a world of ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What went in and came out of one step, ``[rank][name]`` each, gradients and outputs unscaled."""

    grads: Grads
    outs: Grads
    before: Grads
    after: Grads
    """Residuals; zeros where there is none."""

    def sent(self, name: str) -> list[NDArray[np.float64]]:
        """What each rank counts as sent: all that went in and did not stay."""
        return [_wide(g[name]) + _wide(e[name]) - _wide(kept[name])
                for g, e, kept in zip(self.grads, self.before, self.after, strict=True)]

    def magnitude(self, name: str) -> NDArray[np.float64]:
        """Elementwise mean over the ranks of all magnitudes whose rounding can show."""
        per_rank = [abs(_wide(g[name])) + abs(_wide(e[name])) + abs(_wide(kept[name])) + abs(sent)
                    for g, e, kept, sent in zip(self.grads, self.before, self.after, self.sent(name), strict=True)]
        return _mean(per_rank)


def history(codec: Codec, ranks: int, exchange: str = "auto", *, steps: int = 4, ops: Ops = NUMPY.ops,
            scales: Sequence[float] | None = None, shapes: Shapes = SHAPES,
            grads: Callable[[int, int, Shapes], Grads] = values.gradients) -> Iterator[Step]:
    """Run some steps and tell what happened in each."""
    world = LocalWorld(codec, shapes, ranks, exchange=exchange, min_size=MIN_SIZE if shapes is SHAPES else 0, ops=ops)
    for step in range(steps):
        scale = scales[step] if scales else None
        now, before = grads(step, ranks, shapes), _residuals(world)
        scaled = [{name: g * np.float32(scale or 1.0) for name, g in each.items()} for each in now]
        kept = [{name: g.copy() for name, g in each.items()} for each in scaled]
        outs = world.step(scaled, loss_scale=scale)
        for one, other in zip(scaled, kept, strict=True):
            assert all(one[name].tobytes() == other[name].tobytes() for name in one), "the step changed a gradient"
        unscaled = [{name: out / np.float32(scale or 1.0) for name, out in each.items()} for each in outs]
        yield Step(now, unscaled, before, _residuals(world))


def conserves(codec: Codec, ranks: int, exchange: str = "auto", **options: Any) -> None:
    """The mean of what the ranks count as sent is what everyone receives, at every step; so the sum of the
    outputs plus the mean residual is the sum of the mean gradients."""
    given: dict[str, Any] = {}
    received: dict[str, Any] = {}
    allowance: dict[str, Any] = {}
    for number, step in enumerate(history(codec, ranks, exchange, **options)):
        for name in step.outs[0]:
            out, sent = _wide(step.outs[0][name]), step.sent(name)
            allowed = _allowed(codec, ranks, exchange, step.magnitude(name), _mean([abs(s) for s in sent]))
            _within(f"step {number}, {name}: received is not the mean of sent", out, _mean(sent), allowed)
            given[name] = given.get(name, 0.0) + _mean([_wide(g[name]) for g in step.grads])
            received[name] = received.get(name, 0.0) + out
            allowance[name] = allowance.get(name, 0.0) + allowed
            kept = _mean([_wide(e[name]) for e in step.after])
            _within(f"up to step {number}, {name}: gradient was lost", received[name] + kept, given[name],
                    allowance[name])


def loss_scale_loses_nothing(codec: Codec, ranks: int, exchange: str = "auto") -> None:
    """The conservation law in unscaled units while a loss scaler changes its mind."""
    conserves(codec, ranks, exchange, steps=5, scales=(1.0, 65536.0, 32768.0, 0.5, 1024.0))


def ranks_agree(codec: Codec, ranks: int, exchange: str = "auto", **options: Any) -> None:
    """Every rank gets the same bits."""
    for number, step in enumerate(history(codec, ranks, exchange, **options)):
        for name, out in step.outs[0].items():
            for rank, other in enumerate(step.outs):
                assert other[name].dtype == np.float32 and other[name].shape == SHAPES.get(name, out.shape)
                assert other[name].tobytes() == out.tobytes(), f"step {number}: rank {rank} got another {name}"


def counts_every_byte(codec: Codec, ranks: int, exchange: str = "auto") -> None:
    """What the world moved is what ``Exchange.sends`` says."""
    world = LocalWorld(codec, SHAPES, ranks, exchange=exchange, min_size=MIN_SIZE)
    steps = 3
    for step in range(steps):
        world.step(values.gradients(step, ranks, SHAPES))
    said = steps * sum(stats.step_bytes(slot, ranks) for slot in world.plans[0].slots.values())
    assert np.isclose(world.received_bytes, said, rtol=1e-9, atol=0.0), f"{world.received_bytes} moved, {said} said"


def void_step_leaves_no_trace(codec: Codec, ranks: int, bad: float, exchange: str = "auto",
                              ops: Ops = NUMPY.ops) -> None:
    """A non-finite value in one tensor on one rank: no finite output anywhere, no bit of state moved, and all
    goes on as if that step had not been."""
    world, undisturbed = (LocalWorld(codec, SHAPES, ranks, exchange=exchange, min_size=MIN_SIZE, ops=ops)
                          for _ in range(2))
    for each in (world, undisturbed):
        each.step(values.gradients(0, ranks, SHAPES))
    before = _state_bytes(world)
    for name in SHAPES:
        grads = values.gradients(1, ranks, SHAPES)
        grads[-1][name].flat[1] = bad
        with np.errstate(all="ignore"):
            outs = world.step(grads)
        for rank, out in enumerate(outs):
            for other, array in out.items():
                assert not np.isfinite(array).any(), f"{bad} in {name}: {other} is finite on rank {rank}"
        assert _state_bytes(world) == before, f"{bad} in {name} moved state"
    for step in (2, 3):
        grads = values.gradients(step, ranks, SHAPES)
        for out, expected in zip(world.step(grads), undisturbed.step(grads), strict=True):
            for name in SHAPES:
                assert out[name].tobytes() == expected[name].tobytes(), f"step {step}: {name} differs afterwards"


def same_history_in(codec: Codec, backend: Backend, ranks: int, exchange: str = "auto", steps: int = 3) -> None:
    """Several steps in a framework (TensorFlow: in one trace) give numpy's outputs and numpy's state."""
    shapes: Shapes = {"weight": (13, 5), "small": (3,)}  # few, because TensorFlow traces for seconds
    delayed = backend is not TENSORFLOW_GRAPH  # one trace is one stage
    reference = LocalWorld(codec, shapes, ranks, exchange=exchange, min_size=MIN_SIZE, delayed=delayed)
    world = LocalWorld(codec, shapes, ranks, exchange=exchange, min_size=MIN_SIZE, delayed=delayed, ops=backend.ops,
                       state=backend.state)
    calls: list[int] = []

    def one_step(grads: list[dict[str, Array]]) -> list[dict[str, Array]]:
        calls.append(1)
        return world.step(grads)

    run = backend.compiled(one_step)
    for step in range(steps):
        grads = values.gradients(step, ranks, shapes)
        expected = reference.step(grads)
        outs = run([{name: backend.array(g) for name, g in each.items()} for each in grads])
        for out, right in zip(outs, expected, strict=True):
            for name in shapes:
                _same_values(codec, f"step {step}, {name}: {backend} gives", right[name].ravel(),
                             backend.numpy(out[name]).ravel(), right[name])
        for plan, other in zip(reference.plans, world.plans, strict=True):
            for name, slot in plan.slots.items():
                assert slot.state.keys() == other.slots[name].state.keys()
                for key, array in slot.state.items():
                    _same_values(codec, f"step {step}, {name}: {backend} keeps {key}", array,
                                 backend.numpy(other.slots[name].state[key]), array)
    traces = 1 if backend is TENSORFLOW_GRAPH else steps
    assert len(calls) == traces, f"the step was traced {len(calls)} times"


def never_waits(codec: Codec, exchange: str = "auto") -> None:
    """Nothing looks at a value: a whole step runs on tensors that have none."""
    ops = TorchOps("meta")
    world = LocalWorld(codec, SHAPES, 2, exchange=exchange, min_size=MIN_SIZE, ops=ops, delayed=False)
    grads = [{name: torch.zeros(shape, device="meta") for name, shape in SHAPES.items()} for _ in range(2)]
    try:
        outs = world.step(grads)
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(f"a step looked at values: {error}") from error
    assert all(tuple(out[name].shape) == shape for out in outs for name, shape in SHAPES.items())


def zeros_stay_zero(codec: Codec, ranks: int, exchange: str = "auto") -> None:
    """Of nothing, nothing arrives and nothing stays."""
    shapes: Shapes = {str(shape): shape for shape in values.ODD_SHAPES}

    def zeros(step: int, ranks: int, shapes: Shapes) -> Grads:
        return [{name: np.zeros(shape, np.float32) for name, shape in shapes.items()} for _ in range(ranks)]

    for step in history(codec, ranks, exchange, steps=2, shapes=shapes, grads=zeros):
        for what in (step.outs, step.after):
            for each in what:
                for name, array in each.items():
                    assert not array.any(), f"{name}: {array[array != 0][:3]} out of zeros"


def finite_stays_finite(codec: Codec, ranks: int, exchange: str = "auto") -> None:
    """The largest values of float32 on one rank overflow nothing, now or in the next step."""
    n = 41
    for name, x in values.odd(n).items():
        def grads(step: int, ranks: int, shapes: Shapes, x: Floats = x) -> Grads:
            ordinary = values.gradients(step, ranks, shapes)
            return [{"x": x}, *ordinary[1:]] if step == 0 else ordinary

        for number, step in enumerate(history(codec, ranks, exchange, steps=2, shapes={"x": (n,)}, grads=grads)):
            for what, arrays in (("output", step.outs), ("residual", step.after)):
                for each in arrays:
                    assert np.isfinite(each["x"]).all(), f"{name}, step {number}: {what} is not finite"


def _allowed(codec: Codec, ranks: int, exchange: str, magnitude: NDArray[np.float64],
             sent: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far float arithmetic may be off: a few float32 roundings, and what 16-bit sums round in flight."""
    allowed = 2 * (ranks + 4) * _FLOAT32 * magnitude + ranks * 2.0**-126
    if not exact(codec):
        allowed = np.full_like(magnitude, 1e-5 * magnitude.max())
    half = any(part.dtype == "float16" for part in codec.layout(TensorSpec("", (8,))))
    chosen = choose(codec, TensorSpec("", (8,)), ranks, exchange)
    if half and getattr(chosen, "between", chosen).name == "sum":
        allowed = allowed + ranks * _FLOAT16 * (sent if exact(codec) else sent.max())
    return allowed


def _within(what: str, one: NDArray[np.float64], other: NDArray[np.float64], allowed: NDArray[np.float64]) -> None:
    error = np.abs(one - other)
    where = int(np.argmax(error - allowed))
    assert (error <= allowed).all(), (f"{what}: {one.flat[where]} is not {other.flat[where]} "
                                      f"(off by {error.flat[where]}, allowed {allowed.flat[where]})")


def _wide(x: Floats) -> NDArray[np.float64]:
    return np.asarray(x, np.float64)


def _mean(arrays: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.mean(np.array(list(arrays)), axis=0)
    return mean


def _residuals(world: LocalWorld) -> Grads:
    return [{name: _residual(slot, rank, world.ranks) for name, slot in plan.slots.items()}
            for rank, plan in enumerate(world.plans)]


def _residual(slot: Slot, rank: int, ranks: int) -> Floats:
    """What a rank keeps of a tensor. What it keeps of the mean of its chunk it keeps for every rank."""
    kept = np.zeros(slot.spec.numel)
    if RESIDUAL in slot.state:
        kept += np.asarray(slot.state[RESIDUAL])
    if OWNER in slot.state:
        start, stop = bounds(slot.spec.numel, ranks)[rank]
        own = np.asarray(slot.state[OWNER])
        assert not own[stop - start :].any(), "padding shows in the owner's residual"
        kept[start:stop] += ranks * own[: stop - start]
    return kept.reshape(slot.spec.shape)


def _state_bytes(world: LocalWorld) -> list[dict[tuple[str, str], bytes]]:
    return [{(name, key): array.tobytes() for name, slot in plan.slots.items() for key, array in slot.state.items()}
            for plan in world.plans]
