"""One view on the array operations of every framework: eager, traced, and without looking at values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from numpy.typing import NDArray

from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.ops.tensorflow import TensorflowOps
from hvd_gradcomp.ops.torch import TorchOps


@dataclass(frozen=True)
class Backend:
    """How tests hand arrays to a framework and get them back.

    compiled: makes a function of arrays the way the framework runs it (``tf.function`` traces it).
    state: makes a state array of a new array.
    """

    name: str
    ops: Ops
    array: Callable[[NDArray[Any]], Array]
    numpy: Callable[[Array], NDArray[Any]] = np.asarray
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    state: Callable[[Array], Array] = lambda array: array

    def __str__(self) -> str:
        return self.name


class _NotCpu(str):
    """A device that torch takes as the CPU, and our code does not."""

    type = "accelerator"


def _torch_as_on_a_device() -> TorchOps:
    """TorchOps that takes the branches for devices, on CPU tensors."""
    ops = TorchOps()
    ops.device = _NotCpu("cpu")  # type: ignore[assignment]
    ops.sqrt = TorchOps().sqrt  # type: ignore[method-assign]  # on a device torch rounds it correctly
    return ops


def _to_torch(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array.copy())


NUMPY = Backend("numpy", NumpyOps(), np.copy)
TORCH = Backend("torch", TorchOps(), _to_torch)
TORCH_DEVICE = Backend("torch-device", _torch_as_on_a_device(), _to_torch)
TENSORFLOW = Backend("tensorflow", TensorflowOps(), tf.constant, state=tf.Variable)
TENSORFLOW_GRAPH = Backend("tensorflow-graph", TensorflowOps(), tf.constant, compiled=tf.function, state=tf.Variable)

BACKENDS = (NUMPY, TORCH, TORCH_DEVICE, TENSORFLOW, TENSORFLOW_GRAPH)
