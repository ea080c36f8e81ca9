"""Clear errors for what is not installed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from hvd_gradcomp.errors import MissingDependencyError

_HOROVOD = ("Horovod is not installed for it, or was built without it: run docker/build-horovod.sh --install from a "
            "checkout of hvd_gradcomp (a plain 'pip install horovod' does not build against current frameworks)")


def framework(module: str, extra: str) -> ModuleType:
    """Import a framework, or say which extra installs it. Raises MissingDependencyError."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"hvd_gradcomp.{extra} needs {module}: pip install 'hvd-gradcomp[{extra}]' ({error})") from error


def horovod(module: str) -> ModuleType:
    """Import one of Horovod's modules, or say how to get it. Raises MissingDependencyError."""
    try:
        return import_module(module)
    except Exception as error:  # Horovod raises its own errors where a framework's library is missing
        raise MissingDependencyError(f"cannot import {module}. {_HOROVOD}. ({error})") from error


def keras3() -> None:
    """Raise MissingDependencyError unless Keras is version 3 on the TensorFlow backend."""
    keras = framework("keras", "tensorflow")
    if int(keras.__version__.partition(".")[0]) < 3:
        raise MissingDependencyError(
            f"hvd_gradcomp.keras needs Keras 3, not {keras.__version__}: pass compression= to Horovod's own "
            "horovod.tensorflow.keras.DistributedOptimizer, which reduces the gradients of Keras 2 and tf_keras")
    if keras.config.backend() != "tensorflow":
        raise MissingDependencyError(
            f"hvd_gradcomp.keras needs the TensorFlow backend of Keras, not {keras.config.backend()!r}: set "
            "KERAS_BACKEND=tensorflow before keras is imported")
