"""TensorFlow ranks that train with Keras 3 alone."""

from tests.ranks.start_tensorflow import hvd

__all__ = ["hvd"]
