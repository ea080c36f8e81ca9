"""A Compression in ``hvd.elastic.TorchState``: committed, restored, and carried over when ranks leave or join.

Importing this registers the handler in Horovod's own list of handlers; nothing is patched.
"""

from __future__ import annotations

from typing import Any

from horovod.torch.elastic import state as horovod

from hvd_gradcomp import agreement
from hvd_gradcomp.torch.compression import Compression


class CompressionStateHandler(horovod.StateHandler):  # type: ignore[misc]
    """What ``hvd.elastic.TorchState(model, optimizer, compression=compression)`` does with the Compression.

    Residuals differ by rank, so nothing is broadcast from rank 0: a commit keeps this rank's own, a
    restore puts them back, and after the ranks have changed the first step spreads them
    (:func:`hvd_gradcomp.state.spread`).
    """

    def __init__(self, compression: Compression) -> None:
        super().__init__(compression)
        self.save()

    def save(self) -> None:
        self._saved: Any = self.value.snapshot()

    def restore(self) -> None:
        self.value.rewind(self._saved)

    def sync(self) -> None:
        # Ranks that joined have counted no Compression yet, so all start to count anew.
        agreement.forget()
        self.value.rejoin()
        self.save()


def register() -> None:
    """Tell Horovod, once."""
    registry = horovod.get_handler_registry()
    if not any(handled is Compression for handled, _ in registry):
        horovod.set_handler_registry([(Compression, CompressionStateHandler), *registry])
