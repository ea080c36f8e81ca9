"""Horovod's elastic mode with TensorFlow: a state that holds Compressions, and ``run``, which calls Horovod's.

Nothing is patched. Horovod 0.28.1's own ``TensorFlowState`` broadcasts in its constructor, where ranks that
join would wait for ever, and not afterwards; its ``TensorFlowKerasState`` does not know the optimizers of
Keras 3; and its ``run`` takes errors of an all-to-all for the end of training.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError

from hvd_gradcomp import agreement
from hvd_gradcomp.collectives.hvd_tensorflow import hvd
from hvd_gradcomp.tensorflow.compression import Compression
from hvd_gradcomp.tensorflow.engine import unwrap

# The op that failed: one of Horovod's, called eagerly, in a graph, or by a name of ours. Not the files in the message.
_OURS = re.compile(r"Horovod has been shut down|__wrapped__Horovod|\{\{node [^}]*(gradcomp\.|Horovod)")


class State(ObjectState):  # type: ignore[misc]
    """What a commit keeps and a lost rank takes everyone back to: variables, Compressions, plain values.

    ::

        state = elastic.State([*model.variables, *optimizer.variables], compression, step=0)

        @elastic.run
        def train(state):
            @tf.function
            def step(x, y): ...  # inside, so that it is traced for the ranks of the time
            while state.step < 1000:
                step(*batch(state.step))
                state.step += 1
                if state.step % 100 == 0:
                    state.commit()

    Variables and values come from rank 0 when ranks have changed. What a Compression keeps differs by rank:
    a commit keeps this rank's own, a restore puts it back, and the first step with other ranks spreads it
    (:func:`hvd_gradcomp.state.spread`).

    Args:
        variables: of Keras 3, tf_keras or TensorFlow, the same on every rank after each step.
        compression: a Compression or several.
        values: attributes of this object, to be pickled.
    """

    def __init__(self, variables: Iterable[Any], compression: Compression | Iterable[Compression] = (),
                 **values: Any) -> None:
        self._variables = [unwrap(variable) for variable in variables]
        self._compressions = [compression] if isinstance(compression, Compression) else list(compression)
        self._keep()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **values)

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
        for compression, snapshot in zip(self._compressions, self._snapshots, strict=True):
            compression.rewind(snapshot)
        super().restore()

    def sync(self) -> None:
        with horovod_errors():
            hvd.broadcast_variables(self._variables, root_rank=0)
            super().sync()
        agreement.forget()  # ranks that joined have counted no Compression yet
        self.reset()
        self._keep()

    def reset(self) -> None:
        """Horovod has started again, perhaps with other ranks."""
        for compression in self._compressions:
            compression.rejoin()

    def _keep(self) -> None:
        self._values = [variable.numpy() for variable in self._variables]
        self._snapshots = [compression.snapshot() for compression in self._compressions]


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """``hvd.elastic.run``, which also sees that the op that failed was one of Horovod's where its own does not."""
    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        with horovod_errors():
            return function(*args, **kwargs)

    return hvd.elastic.run(seen)


@contextmanager
def horovod_errors() -> Iterator[None]:
    """Turn TensorFlow's error of a failed op of Horovod's into the one that Horovod's elastic mode waits for."""
    try:
        yield
    except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
        if _OURS.search(error.message):
            raise HorovodInternalError(error.message) from error
        raise
