"""What travels: named arrays of fixed sizes, joined into one buffer of bytes.

The layout follows from codec and shape alone, so nothing but the values is sent and a receiver
knows every length beforehand. Wire format: the parts in the order of falling item size (so that
each one starts aligned), little endian, without gaps; zeros up to a multiple of 4 bytes at the end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops.base import ITEMSIZE, Array, Ops

if sys.byteorder != "little":  # pragma: no cover - no supported framework runs there
    raise ImportError("hvd_gradcomp sends little-endian bytes and has no big-endian version")

Parts = Mapping[str, Array]
_ALIGN = 4


class Part(NamedTuple):
    """One named array of a payload: a vector of ``length`` items of ``dtype``."""

    name: str
    length: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.length * ITEMSIZE[self.dtype]


Layout = tuple[Part, ...]


@lru_cache(maxsize=4096)
def nbytes(layout: Layout) -> int:
    """Bytes of the buffer that :func:`pack` makes."""
    return math.ceil(sum(part.nbytes for part in layout) / _ALIGN) * _ALIGN


class Packed(Mapping[str, Array]):
    """The parts of one buffer, each looked at only when it is asked for."""

    def __init__(self, ops: Ops, blob: Array, layout: Layout) -> None:
        self.ops, self.blob, self.layout = ops, blob, layout
        self._parts: dict[str, Array] | None = None

    def __getitem__(self, name: str) -> Array:
        if self._parts is None:
            self._parts = {name: self.ops.bitcast(self.blob[start:end], dtype)
                           for name, start, end, dtype in places(self.layout)}
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return (part.name for part in self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def pack(ops: Ops, parts: Parts, layout: Layout) -> Array:
    """All parts in one uint8 vector of ``nbytes(layout)``."""
    if type(parts) is Packed and parts.layout == layout:
        return parts.blob
    check(ops, parts, layout)
    pieces = [ops.bitcast(parts[part.name], "uint8") for part in _wire_order(layout) if part.length]
    gap = nbytes(layout) - sum(part.nbytes for part in layout)
    if gap or not pieces:
        pieces.append(ops.zeros((gap,), "uint8"))
    return pieces[0] if len(pieces) == 1 else ops.concat(pieces)


def unpack(ops: Ops, blob: Array, layout: Layout) -> Packed:
    """The parts of one received buffer, without copies where the framework allows it.

    Raises PayloadError if the buffer is not a uint8 vector of exactly ``nbytes(layout)``.
    """
    if ops.dtype(blob) != "uint8" or tuple(blob.shape) != (nbytes(layout),):
        raise PayloadError(f"expected {nbytes(layout)} bytes, got {tuple(blob.shape)} of {ops.dtype(blob)}")
    return Packed(ops, blob, layout)


def check(ops: Ops, parts: Parts, layout: Layout) -> None:
    """Raise PayloadError unless ``parts`` has exactly the names, lengths and dtypes of ``layout``."""
    if parts.keys() != {part.name for part in layout}:
        raise PayloadError(f"parts {sorted(parts)} do not match the layout {[part.name for part in layout]}")
    for part in layout:
        array = parts[part.name]
        if tuple(array.shape) != (part.length,) or ops.dtype(array) != part.dtype:
            raise PayloadError(f"part {part.name!r} is {ops.dtype(array)}{tuple(array.shape)}, "
                               f"the layout says {part.dtype}({part.length},)")


@lru_cache(maxsize=4096)
def places(layout: Layout) -> list[tuple[str, int, int, str]]:
    """``(name, first byte, end, dtype)`` of each part, in the order on the wire."""
    places, start = [], 0
    for part in _wire_order(layout):
        places.append((part.name, start, start + part.nbytes, part.dtype))
        start += part.nbytes
    return places


def _wire_order(layout: Layout) -> Sequence[Part]:
    return sorted(layout, key=lambda part: -ITEMSIZE[part.dtype])  # stable
