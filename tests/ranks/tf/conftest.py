"""TensorFlow ranks (Keras 3)."""

import horovod.tensorflow as horovod_tensorflow
import pytest
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
horovod_tensorflow.init()


@pytest.fixture
def hvd():  # noqa: ANN201
    return horovod_tensorflow
