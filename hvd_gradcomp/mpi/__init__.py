"""Gradient compression for ``mpi4py`` and numpy."""

from hvd_gradcomp import require

require.framework("mpi4py.MPI", "mpi")

from hvd_gradcomp.mpi.compression import Compression, Request  # noqa: E402

__all__ = ["Compression", "Request"]
