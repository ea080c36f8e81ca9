"""What every folder of TensorFlow ranks begins with: its conftest imports the fixture."""

import horovod.tensorflow as horovod_tensorflow
import pytest
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
horovod_tensorflow.init()


@pytest.fixture
def hvd():
    return horovod_tensorflow
