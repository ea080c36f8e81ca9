"""TensorFlow ranks (Keras 3)."""

import horovod.tensorflow as horovod_tensorflow
import pytest
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
horovod_tensorflow.init()


@pytest.fixture
def hvd():
    return horovod_tensorflow


@pytest.fixture(scope="session")
def part():
    """The process set of all ranks but the last."""
    return horovod_tensorflow.add_process_set(list(range(horovod_tensorflow.size() - 1)))
