"""Gradient compression for ``horovod.tensorflow``."""

from hvd_gradcomp import require

require.framework("tensorflow", "tensorflow")
require.horovod("horovod.tensorflow")

from hvd_gradcomp.collectives.process_sets import host_process_sets  # noqa: E402
from hvd_gradcomp.tensorflow.compression import Compression  # noqa: E402
from hvd_gradcomp.tensorflow.dgc import DGCOptimizer  # noqa: E402
from hvd_gradcomp.tensorflow.tape import DistributedGradientTape  # noqa: E402

__all__ = ["Compression", "DGCOptimizer", "DistributedGradientTape", "host_process_sets"]
