"""Gradient compression for Keras 3 on the TensorFlow backend, with ``horovod.tensorflow``."""

from hvd_gradcomp import require

require.framework("tensorflow", "tensorflow")
require.keras3()
require.horovod("horovod.tensorflow")

from hvd_gradcomp.keras.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback  # noqa: E402
from hvd_gradcomp.keras.dgc import DGCOptimizer  # noqa: E402
from hvd_gradcomp.keras.optimizer import DistributedOptimizer  # noqa: E402

__all__ = ["BroadcastGlobalVariablesCallback", "DGCOptimizer", "DistributedOptimizer", "MetricAverageCallback"]
