"""``DistributedGradientTape``: Horovod's, knowing which gradient belongs to which variable."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_gradcomp.collectives.hvd_tensorflow import hvd
from hvd_gradcomp.errors import ProcessSetError
from hvd_gradcomp.tensorflow.compression import Compression, compression_of
from hvd_gradcomp.tensorflow.engine import as_written, global_set, unwrap
from hvd_gradcomp.tensorflow.step import Gradient, check_op


class DistributedGradientTape:
    """A tape whose ``gradient()`` is reduced over the ranks, compressed.

    ::

        with tf.GradientTape() as tape:
            loss = ...
        tape = gradcomp.DistributedGradientTape(tape, compression=compression)
        grads = tape.gradient(loss, model.trainable_variables)

    Beyond ``hvd.DistributedGradientTape``: takes Keras 3 variables as well as ``tf.Variable``, any
    of the Compression's in any order; an inf or NaN anywhere voids the whole step; a variable that
    only some ranks use gets the same gradient on all; honours ``unconnected_gradients``. Works
    eagerly and inside ``tf.function``. With one rank it returns the tape's own gradients.

    Args:
        gradtape: the recorded ``tf.GradientTape``.
        compression: a :class:`Compression`, created once for the whole training, or Horovod's own
            ``Compression.none`` or ``.fp16``, with which the stock tape does the work.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: splits the division of ``op=Average``, as in Horovod.
        sparse_as_dense: reduce IndexedSlices as dense (and compressed) gradients.
        process_set: the Compression's by default; another one is an error.
        scale_local_gradients: divide the gradients of :meth:`register_local_source` by the number
            of ranks, as Horovod does.

    Raises:
        UsageError: ``compression`` is a spec string or something else that is no compression.
        SpecError: an op or predivide factor that compression cannot honour.
        ProcessSetError: ``process_set`` is not the Compression's.
    """

    def __init__(self, gradtape: tf.GradientTape, *, compression: Any = Compression.none, op: Any = hvd.Average,
                 gradient_predivide_factor: float = 1.0, sparse_as_dense: bool = False, process_set: Any = None,
                 scale_local_gradients: bool = True) -> None:
        self._tape = gradtape
        self._compression = compression_of(compression)
        self._local: set[Any] = set()
        self._scale_local = scale_local_gradients
        self._options = {"op": op, "predivide": gradient_predivide_factor, "sparse_as_dense": sparse_as_dense}
        if self._compression is None:
            self._tape = hvd.DistributedGradientTape(
                gradtape, compression=compression, op=op, gradient_predivide_factor=gradient_predivide_factor,
                sparse_as_dense=sparse_as_dense, process_set=global_set(process_set),
                scale_local_gradients=scale_local_gradients)
            return
        check_op(op, gradient_predivide_factor)
        theirs = self._compression.engine.process_set
        if process_set is not None and process_set.process_set_id != theirs.process_set_id:
            raise ProcessSetError(f"the tape was given {process_set}, its Compression {theirs}; give both the same")

    @as_written
    def gradient(self, target: Any, sources: Any, output_gradients: Any = None,
                 unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE) -> Any:
        """As ``tf.GradientTape.gradient``, reduced over the ranks; in the structure of ``sources``.

        Raises:
            UsageError: a source is not one of the Compression's variables.
            DisagreementError: on every rank, if the ranks were configured differently.
        """
        variables = [unwrap(source) for source in tf.nest.flatten(sources)]
        if self._compression is None:
            grads = self._tape.gradient(target, variables, output_gradients)
            if unconnected_gradients != tf.UnconnectedGradients.NONE:
                grads = [tf.zeros_like(v) if g is None else g for g, v in zip(grads, variables, strict=True)]
        else:
            grads = self._tape.gradient(target, variables, output_gradients, unconnected_gradients)
            grads = self._reduce(self._compression, grads, variables)
        return tf.nest.pack_sequence_as(sources, grads)

    def register_local_source(self, source: Any) -> None:
        """Leave this variable's gradient local, as Horovod's method of this name does."""
        if self._compression is None:
            self._tape.register_local_source(unwrap(source))
        self._local.add(unwrap(source).ref())

    def _reduce(self, compression: Compression, grads: list[Gradient], variables: list[Any]) -> list[Gradient]:
        shared = [(g, v) for g, v in zip(grads, variables, strict=True) if v.ref() not in self._local]
        reduced = iter(compression.step([g for g, _ in shared], [v for _, v in shared], **self._options))
        divisor = compression.engine.size if self._scale_local else 1
        return [_divide(g, divisor) if v.ref() in self._local else next(reduced)
                for g, v in zip(grads, variables, strict=True)]

    def __getattr__(self, name: str) -> Any:
        """``watch``, ``stop_recording`` and so on: the recorded tape's."""
        return getattr(self.__dict__["_tape"], name)


def _divide(grad: Gradient, n: int) -> Gradient:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / n, grad.indices, grad.dense_shape)
    return None if grad is None else grad / n
