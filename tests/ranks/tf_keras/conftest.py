"""TensorFlow ranks with tf_keras, the Keras that Horovod 0.28.1 knows (TF_USE_LEGACY_KERAS=1)."""

import os

import horovod.tensorflow as horovod_tensorflow
import pytest
import tensorflow as tf

assert os.environ.get("TF_USE_LEGACY_KERAS") == "1", "start these tests with TF_USE_LEGACY_KERAS=1"
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
horovod_tensorflow.init()


@pytest.fixture
def hvd():
    return horovod_tensorflow
