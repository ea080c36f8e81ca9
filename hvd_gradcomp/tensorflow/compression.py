"""``Compression``: passed as ``compression=`` to Horovod's stock tape and optimizers, or to our tape."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_gradcomp import checkpoint, state, stats, unused
from hvd_gradcomp.collectives import hvd_tensorflow
from hvd_gradcomp.collectives.hvd_tensorflow import hvd
from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.exchange.base import wire_bytes
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.memory import error_feedback as memory
from hvd_gradcomp.plan import Exchanges, Plan
from hvd_gradcomp.policy import DEFAULT_MIN_SIZE, Policy
from hvd_gradcomp.tensorflow import wire
from hvd_gradcomp.tensorflow.engine import OPS, Bound, Engine, as_written, counted, global_set
from hvd_gradcomp.tensorflow.step import StepReducer
from hvd_gradcomp.tensorflow.stock import CallOrder, Token, make_token, token_nbytes


class Compression(tf.train.experimental.PythonState):  # type: ignore[misc]
    """Gradient compression for an unmodified ``horovod.tensorflow``.

    ::

        compression = gradcomp.Compression("topk(ratio=0.01)", variables=model.trainable_variables)
        tape = hvd.DistributedGradientTape(tape, compression=compression)

    Create it once, outside of any ``tf.function``: it owns the residuals, as variables. One
    Compression belongs to one training loop. Every rank must use its Compressions for the first
    time in the same order. With one rank nothing is exchanged and nothing is compressed.

    Under the stock tape and optimizers an inf or NaN in one tensor on any rank makes that tensor's
    result NaN on every rank and moves none of its state; the other tensors go on. With
    :class:`hvd_gradcomp.tensorflow.DistributedGradientTape` the whole step is void.
    A process set that differs from Horovod's, and calls that do not match ``variables``, fail at
    run time as ``tf.errors.InvalidArgumentError``.

    Args:
        compression: spec string or codec; or different ones by layer or by step, see :meth:`Policy.make`.
        variables: the trainable variables, of Keras 3, tf_keras or TensorFlow. Stock Horovod does
            not say which variable a gradient belongs to: there, list those that get a dense
            gradient in the order of the sources.
        exchange: how payloads are combined: ``"auto"``, ``"sum"``, ``"gather"``, ``"two_stage"``,
            ``"sparse_split"``, ``"hierarchical"`` (dense inside a host; see docs/exchange.md); or a dict of name
            patterns to these.
        min_size: tensors with fewer elements are left to Horovod; 0 compresses all.
        process_set: the one that the tape or optimizer gets; the global one by default.
        loss_scale: what the loss is multiplied by (a number, a variable, or a callable that gives
            one): residuals are kept divided by it.
        seed: of the stochastic codecs.
        error_feedback: keep what was not sent and add it to the next gradient.
        verify: send a checksum with what is gathered; wrong bytes are an error that names their rank, at a cost
            (``docs/state.md``). For all ranks alike.
        sgd: gives what the optimizer does with a variable's gradient, which is then done before
            compression: for the DGC optimizers. Without Horovod's tape, through :attr:`step` alone.

    Raises:
        SpecError: a spec, exchange or min_size that cannot be.
        UsageError: no variables, one of them twice, or created inside a ``tf.function``.
    """

    none = hvd.Compression.none
    """Horovod's own ``hvd.Compression.none``."""
    fp16 = hvd.Compression.fp16
    """Horovod's own ``hvd.Compression.fp16``: a plain cast, without error feedback or scaling."""

    def __init__(self, compression: Any, variables: Iterable[Any], *, exchange: Exchanges = "auto",
                 min_size: int = DEFAULT_MIN_SIZE, process_set: Any = None, loss_scale: Any = None, seed: int = 0,
                 error_feedback: bool = True, verify: bool = False,
                 sgd: Callable[[tf.Variable], Momentum] | None = None) -> None:
        policy = Policy.make(compression, min_size)
        engine = Engine(variables, policy, exchange=exchange, process_set=global_set(process_set),
                        loss_scale=loss_scale, seed=seed, error_feedback=error_feedback, verify=verify, sgd=sgd)
        self.engine = engine
        self.step = StepReducer(engine)
        """Reduces all gradients of a step at once: for our tape and other wrappers."""
        self._order = CallOrder(engine.bounds)
        reference = weakref.ref(engine)  # the watch must not keep the residuals alive
        unused.watch(f"Compression({policy})", lambda: _was_used(reference()), hvd.size)

    # -- what stock Horovod calls, while it traces ----------------------------------------------

    @as_written
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """What Horovod is to reduce: a token, or the gradient itself if it is not compressed.

        Raises:
            UsageError: the call does not match the variables.
            DisagreementError: on every rank, if the ranks were configured differently.
        """
        engine = self.engine
        if hvd.size() == 1:  # traced, but never run
            return tensor, None
        bound = self._order.next(tensor)
        if engine.is_member:
            engine.agree()
        name = f"gradcomp_{bound.index}"  # Horovod names its collective after it
        if bound.slot.codec is None:
            return tf.identity(wire.pack(bound, tensor), name=name), (bound, tensor.dtype, None)
        x = engine.flat(bound, tensor)
        dtype = tf.float64 if tensor.dtype == tf.float64 else tf.float32
        ticket = make_token(engine.process_set.ranks, hvd.rank(), OPS.all_finite(x), dtype)
        return tf.identity(ticket, name=name), (bound, tensor.dtype, x)

    @as_written
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The gradient that the optimizer is to see, from what Horovod reduced."""
        if ctx is None:
            return tensor
        bound, dtype, x = ctx
        if x is None:
            return counted(bound, bound.stage(), wire.unpack(bound, tensor, dtype), self._order.complete())
        engine, ticket = self.engine, Token(tensor)
        checked = ticket.check(engine.process_set.ranks)
        if not engine.is_member:  # only reached if Horovod reduces over other ranks than we were given
            with tf.control_dependencies([checked]):
                return tf.zeros(bound.slot.spec.shape, dtype)
        first = self._after_first_check(bound, ticket, checked)
        with tf.control_dependencies([engine.still(), self._order.complete(), first]):
            x = tf.identity(x)
        stage = bound.stage()
        [mean] = engine.reduce([(bound, stage, x)], ticket.verdict, engine.name)
        return counted(bound, stage, tf.cast(mean * ticket.factor, dtype), checked)

    def _after_first_check(self, bound: Bound, ticket: Token, checked: tf.Operation) -> tf.Tensor:
        """In a variable's first step its exchange waits for the token: with the wrong process set
        it would hang. Later steps do not wait."""
        with tf.control_dependencies([checked]):
            after = tf.identity(ticket.one)
        return tf.cond(tf.reduce_sum(bound.steps) > 0, lambda: tf.ones_like(after), lambda: after)

    # -- what users ask -------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Bytes and choices so far on this rank.

        Returns:
            ``steps``; ``wire_bytes_sent`` and ``wire_bytes_received`` (this rank's, counted as ring
            collectives, tokens and step flag included); ``dense_bytes`` (what a float32 ring
            all-reduce would have received); ``ratio`` (dense_bytes / wire_bytes_received);
            ``ranks``; ``tensors``: per variable codec, exchange, payload bytes, residual norm, or
            the reason why it is not compressed.
        """
        engine = self.engine
        ranks = engine.process_set.size() or 1
        compressed = sum(slot.codec is not None for slot in engine.plan.slots.values())
        overhead = 0.0
        if compressed:
            overhead = wire_bytes("sum", 4 if self.step.used else token_nbytes() * compressed, ranks)
        extra: dict[str, dict[str, Any]] = {}
        for bound in engine.bounds:
            name, residual = bound.slot.spec.name, bound.slot.state.get(memory.STATE)
            if bound.index in self.step.sparse:
                extra[name] = {"codec": None, "exchange": "horovod", "payload_bytes": None,
                               "reason": "sparse gradient: gathered as IndexedSlices"}
            elif residual is not None:
                extra[name] = {"residual_norm": float(np.linalg.norm(residual.numpy()))}
        steps = {bound.slot.spec.name: bound.steps.numpy().tolist() for bound in engine.bounds}
        return stats.summary(engine.plan, ranks, steps, extra, overhead)

    @property
    def plan(self) -> Plan:
        """Every variable with its codec, exchange and state."""
        return self.engine.plan

    # -- Horovod's elastic mode -----------------------------------------------------------------

    def snapshot(self) -> Any:
        """What :meth:`rewind` goes back to."""
        return self.state_dict(), self.plan, self.engine.place

    def rewind(self, snapshot: Any) -> None:
        """Back to a snapshot of this same object, after a step that was cut off by a lost rank."""
        saved, plan, self.engine.place = snapshot
        self.engine.use(plan)
        state.put(saved, plan, lambda target, array: target.assign(array))
        self.rejoin()

    def rejoin(self) -> None:
        """Ranks may have changed: see :meth:`Engine.rejoin`."""
        self.engine.rejoin()
        self.step.forget()

    @property
    def world(self) -> tuple[int, int]:
        """``(rank, ranks)`` among those that reduce together."""
        process_set = self.engine.process_set
        return process_set.rank() or 0, process_set.size() or 1

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and codec state: numpy arrays and plain values, for one file per rank. See
        :mod:`hvd_gradcomp.checkpoint` for files, and :mod:`hvd_gradcomp.state` for what it holds."""
        return state.save(self.plan, *self.world, lambda array: array.numpy())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` of the same rank, world size and configuration.

        Raises StateError, before anything is changed, if it does not fit.
        """
        state.restore(state_dict, self.plan, *self.world, lambda target, saved: target.assign(saved))
        self.engine.place = self.world

    def plan_for(self, saved: Mapping[str, Any]) -> Plan:
        """For :mod:`hvd_gradcomp.checkpoint`: the plan with all state arrays."""
        return self.plan

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("a Compression cannot be copied or pickled: it is bound to the variables of one model. Save "
                         "its state_dict(), and load that into a new Compression")

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's bytes in rank order; waits for all ranks."""
        if self.world[1] == 1:
            return [data]
        return hvd_tensorflow.gather_bytes(data, self.engine.process_set, "gradcomp.state")

    def serialize(self) -> bytes:
        """For ``tf.train.Checkpoint(compression=compression)``, which then holds this rank's :meth:`state_dict`:
        write one on every rank, each under a path of its own."""
        return checkpoint.dumps(self.state_dict())

    def deserialize(self, string_value: bytes) -> None:
        """For ``tf.train.Checkpoint.restore``. Raises StateError, as :meth:`load_state_dict` does."""
        self.load_state_dict(checkpoint.loads(string_value, "the Compression's part of this tf.train.Checkpoint"))


def compression_of(value: Any) -> Compression | None:
    """``value`` if it is a Compression; None for Horovod's own compressors.

    Raises UsageError for anything else, such as a spec string.
    """
    if isinstance(value, Compression):
        return value
    if isinstance(value, type) and issubclass(value, hvd.Compression.none.__mro__[-2]):
        return None
    raise UsageError(f"compression={value!r}: create the Compression once, before the training loop, because its "
                     "residuals must outlive the tape: compression = Compression("
                     f"{value if isinstance(value, str) else 'spec'!r}, variables=model.trainable_variables)")


def _was_used(engine: Engine | None) -> bool:
    return engine is None or engine.place[1] > 0
