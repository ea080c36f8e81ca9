"""TensorFlow ranks with tf_keras, the Keras that Horovod 0.28.1 knows (TF_USE_LEGACY_KERAS=1)."""

import os

assert os.environ.get("TF_USE_LEGACY_KERAS") == "1", "start these tests with TF_USE_LEGACY_KERAS=1"

from tests.ranks.start_tensorflow import hvd  # noqa: E402

__all__ = ["hvd"]
