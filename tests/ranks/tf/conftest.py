"""TensorFlow ranks (Keras 3)."""

import horovod.tensorflow as horovod_tensorflow
import pytest

from tests.ranks.start_tensorflow import hvd

__all__ = ["hvd", "part"]


@pytest.fixture(scope="session")
def part():
    """The process set of all ranks but the last."""
    return horovod_tensorflow.add_process_set(list(range(horovod_tensorflow.size() - 1)))
