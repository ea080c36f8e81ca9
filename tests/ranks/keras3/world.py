"""A small Keras 3 network and data that differ by rank."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH, EPOCHS = 128, 16, 2
STEPS = EPOCHS * ROWS // BATCH


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs ``[128, 32]`` and labels of one rank; labels follow one rule for all."""
    random = np.random.RandomState(100 + rank)
    x = random.standard_normal((ROWS, 32)).astype("float32")
    return x, (x @ np.random.RandomState(5).standard_normal((32, 10))).argmax(1)


def network(optimizer: Any, **compiled: Any) -> keras.Sequential:
    """Two dense layers with the same first weights everywhere."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, activation="relu", name="hidden"),
                              keras.layers.Dense(10, name="out")])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  **{"jit_compile": False, **compiled})
    return model


def fit(model: keras.Sequential, epochs: int = EPOCHS, **options: Any) -> list[float]:
    """Train on this rank's own data; the losses by epoch."""
    x, y = data(hvd.rank())
    return model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **options).history["loss"]


def joint(optimizer: Any, epochs: int = EPOCHS) -> np.ndarray:
    """The weights after training on the ranks' batches joined, in this process alone."""
    model = network(optimizer)
    parts = [data(rank) for rank in range(hvd.size())]
    for _ in range(epochs):
        for i in range(0, ROWS, BATCH):
            model.train_on_batch(*(np.concatenate([part[which][i:i + BATCH] for part in parts]) for which in (0, 1)))
    model.optimizer.finalize_variable_values(model.trainable_weights)  # as fit does
    return weights(model)


def weights(model: keras.Sequential) -> np.ndarray:
    """All weights as one vector."""
    return np.concatenate([w.ravel() for w in model.get_weights()])


def ranks_differ(model: keras.Sequential) -> bool:
    """Whether any rank's weights differ from rank 0's in any bit."""
    everyone = hvd.allgather_object(weights(model))
    return any(everyone[0].tobytes() != other.tobytes() for other in everyone)


def step(optimizer: Any, grads: list[Any], variables: list[keras.Variable]) -> None:
    """One traced ``apply`` with gradients that the test chooses."""
    tf.function(lambda: optimizer.apply([tf.constant(g, tf.float32) for g in grads], variables))()
