"""Which codec a tensor gets, and the reason when it gets none."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.codecs.dense import Dense
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.spec import TensorSpec

DEFAULT_MIN_SIZE = 16384
"""Elements from which compression is taken to pay; smaller tensors go with Horovod, which fuses
them. An estimate of the break-even on ordinary Ethernet, not a measurement."""


@dataclass(frozen=True)
class Policy:
    """One codec for every tensor of at least ``min_size`` elements."""

    codec: Codec
    min_size: int = DEFAULT_MIN_SIZE

    def __post_init__(self) -> None:
        if type(self.min_size) is not int or self.min_size < 0:
            raise SpecError(f"min_size must be a whole number from 0 (compress everything), not {self.min_size!r}")

    def choose(self, spec: TensorSpec) -> tuple[Codec | None, str]:
        """``(codec, "")``, or ``(None, why it is not compressed)``."""
        if isinstance(self.codec, Dense):
            return None, "codec 'none'"
        if spec.numel == 0:
            return None, "empty"
        if spec.numel < self.min_size:
            return None, f"small: {spec.numel} elements, min_size={self.min_size}"
        return self.codec, ""
