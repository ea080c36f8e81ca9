"""Gradient compression for the Horovod you already have.

The adapters are ``hvd_gradcomp.torch``, ``hvd_gradcomp.tensorflow`` and ``hvd_gradcomp.keras``; this
module imports no framework.
"""

from hvd_gradcomp import checkpoint
from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.errors import GradcompError
from hvd_gradcomp.spec import parse
from hvd_gradcomp.version import __version__

__all__ = ["Codec", "GradcompError", "__version__", "checkpoint", "parse"]
