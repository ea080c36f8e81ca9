"""Gradient compression for ``horovod.torch``."""

from hvd_gradcomp import require

require.framework("torch", "torch")
require.horovod("horovod.torch")

from hvd_gradcomp.collectives.process_sets import host_process_sets  # noqa: E402
from hvd_gradcomp.torch import elastic  # noqa: E402
from hvd_gradcomp.torch.compression import Compression  # noqa: E402
from hvd_gradcomp.torch.dgc import DGCOptimizer  # noqa: E402
from hvd_gradcomp.torch.optimizer import DistributedOptimizer  # noqa: E402

__all__ = ["Compression", "DGCOptimizer", "DistributedOptimizer", "host_process_sets"]

elastic.register()  # so that hvd.elastic.TorchState(compression=...) knows what to do with one
