"""``verify=True``: whatever another exchange gathers travels with a checksum, which is compared on arrival."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.exchange.base import Exchange, Rounds, Send
from hvd_gradcomp.memory.base import Memory
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.spec import TensorSpec

CHECKSUM = 4
"""Bytes of a CRC-32, little endian, behind every row."""


class Verified(Exchange):
    """Another exchange with a CRC-32 behind each rank's bytes of every all-gather and all-to-all.

    The checksum also covers tensor, round, sender and receiver, so bytes that are whole but belong
    elsewhere are found too. What is added in flight (``sum``, ``max``) has none: sums have no checksum.

    Raises PayloadError, before the tensor's state changes, with the ranks whose bytes do not fit. Its
    work is done on the host, so a device waits for it.
    """

    def __init__(self, inner: Exchange) -> None:
        self._inner, self.name = inner, inner.name

    def allows(self, codec: Codec) -> str | None:
        return self._inner.allows(codec)

    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        rounds, answer, number = self._inner.rounds(codec, memory, ctx), None, 0
        while True:
            try:
                request = rounds.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value
            if request.how not in ("gather", "all_to_all"):
                answer = yield request
                continue
            to = range(ctx.ranks) if request.how == "all_to_all" else (None,)
            labels = {part: f"{ctx.spec.name} {number} {part}" for part in request.parts}
            received = yield Send({part: _sealed(ctx.ops, array, [f"{labels[part]} {ctx.rank} {i}" for i in to])
                                   for part, array in request.parts.items()}, request.how)
            i = ctx.rank if request.how == "all_to_all" else None
            answer = {part: _opened(ctx, array, int(request.parts[part].shape[0]) // len(to), labels[part], i)
                      for part, array in received.items()}
            number += 1

    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        rows = {"gather": 1, "all_to_all": ranks}
        return [(how, nbytes + CHECKSUM * rows.get(how, 0)) for how, nbytes in self._inner.sends(codec, spec, ranks)]

    def state(self, codec: Codec, spec: TensorSpec, ranks: int, memory: bool) -> dict[str, tuple[int, str]]:
        return self._inner.state(codec, spec, ranks, memory)


def _sealed(ops: Ops, array: Array, labels: list[str]) -> Array:
    """uint8 ``[rows * width]`` with a checksum behind each row; a row for each label."""
    rows, width = len(labels), int(array.shape[0]) // len(labels)

    def seal(given: dict[str, Any]) -> list[Any]:
        out = np.empty((rows, width + CHECKSUM), np.uint8)
        out[:, :width] = given["rows"].reshape(rows, width)
        for row, label in zip(out, labels, strict=True):
            row[width:] = _checksum(row[:width], label)
        return [out.reshape(-1)]

    return ops.host(seal, {"rows": array}, [(rows * (width + CHECKSUM), "uint8")])[0]


def _opened(ctx: Ctx, array: Array, width: int, label: str, receiver: int | None) -> Array:
    """uint8 ``[ranks, width]`` of ``[ranks, width + 4]``, whose checksums fit."""
    ops, ranks = ctx.ops, ctx.ranks
    if tuple(array.shape) != (ranks, width + CHECKSUM):
        raise PayloadError(f"tensor {ctx.spec.name!r}: expected {width + CHECKSUM} bytes from each of {ranks} ranks, "
                           f"got {tuple(array.shape)}")

    def open_(given: dict[str, Any]) -> list[Any]:
        rows = given["rows"].reshape(ranks, width + CHECKSUM)
        wrong = [str(rank) for rank, row in enumerate(rows)
                 if row[width:].tobytes() != _checksum(row[:width], f"{label} {rank} {receiver}").tobytes()]
        if wrong:
            raise PayloadError(f"tensor {ctx.spec.name!r}: the bytes from rank {', '.join(wrong)} (of {ranks} that "
                               "reduce together) do not fit their checksum: damaged on the way, or of another tensor")
        return [rows[:, :width].reshape(-1)]

    opened = ops.host(open_, {"rows": ops.reshape(array, (-1,))}, [(ranks * width, "uint8")])[0]
    return ops.reshape(opened, (ranks, width))


def _checksum(row: Any, label: str) -> Any:
    return np.frombuffer(crc32(row, crc32(label.encode())).to_bytes(CHECKSUM, "little"), np.uint8)
