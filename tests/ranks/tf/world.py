"""Variables whose gradients a test chooses, reduced by Horovod's tape or by ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow as gradcomp
from hvd_gradcomp.exchange.two_stage import OWNER, bounds

CODECS = ["none", "fp16", "bf16", "uniform(bits=8)", "uniform(bits=3, block=64, stochastic=True)", "sign",
          "topk(ratio=0.05)", "topk(ratio=0.1) + uniform(bits=8)"]
TAPES: dict[str, Any] = {"stock": hvd.DistributedGradientTape, "ours": gradcomp.DistributedGradientTape}


def randn(*shape: int, seed: int, rank: int | None = None) -> np.ndarray:
    """Normal float32 numbers that any rank can make for any rank."""
    rank = hvd.rank() if rank is None else rank
    return np.random.RandomState(1000 * seed + rank).standard_normal(shape).astype("float32")


def mean_over_ranks(make: Callable[[int], np.ndarray]) -> np.ndarray:
    """The mean gradient, in float64, computed without any collective."""
    return sum(np.asarray(make(rank), "float64") for rank in range(hvd.size())) / hvd.size()


def assert_equal_on_ranks(array: Any) -> None:
    """Bitwise equality over all ranks."""
    everyone = hvd.allgather_object(np.ascontiguousarray(array))
    for rank, other in enumerate(everyone):
        assert everyone[0].tobytes() == other.tobytes(), f"rank {rank} differs from rank 0"


class World:
    """Zero variables of the given shapes. ``options`` go to the tape, ``kwargs`` to Compression."""

    def __init__(self, spec: Any, shapes: Mapping[str, Sequence[int]], *, tape: str, traced: bool = True,
                 dtype: str = "float32", min_size: int = 0, options: Mapping[str, Any] | None = None,
                 **kwargs: Any) -> None:
        self.variables = {name: tf.Variable(tf.zeros(shape, dtype), name=name) for name, shape in shapes.items()}
        self.compression = gradcomp.Compression(spec, variables=self.variables.values(), min_size=min_size, **kwargs)
        self.tape, self.options = TAPES[tape], dict(options or {})
        self.traces = 0
        self._run = tf.function(self._gradients) if traced else self._gradients

    def _gradients(self, grads: Mapping[str, tf.Tensor]) -> list[Any]:
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.cast(tf.reduce_sum(self.variables[name] * grad), tf.float32)
                             for name, grad in grads.items()])
        tape = self.tape(tape, compression=self.compression, **self.options)
        return tape.gradient(loss, list(self.variables.values()))

    def reduce(self, grads: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """One step: each named variable's gradient is exactly what is given; reduced, or None."""
        outs = self._run({name: tf.constant(grad, self.variables[name].dtype) for name, grad in grads.items()})
        return {name: None if out is None else out.numpy() for name, out in zip(self.variables, outs, strict=True)}

    def residual(self, name: str) -> np.ndarray:
        """Mean over ranks of the residual, in float64, and what the owners of chunks keep of their means."""
        slot = self.compression.engine.plan.slots[name]
        kept = np.zeros(slot.spec.numel)
        if "residual" in slot.state:
            kept += slot.state["residual"].numpy()
        if OWNER in slot.state:
            start, stop = bounds(slot.spec.numel, hvd.size())[hvd.rank()]
            kept[start:stop] += hvd.size() * slot.state[OWNER].numpy()[: stop - start]
        everyone = hvd.allgather_object(kept)
        return mean_over_ranks(lambda rank: everyone[rank]).reshape(slot.spec.shape)

    def states(self) -> dict[str, np.ndarray]:
        """A copy of every state array."""
        return {f"{name}/{key}": array.numpy() for name, slot in self.compression.engine.plan.slots.items()
                for key, array in slot.state.items()}
