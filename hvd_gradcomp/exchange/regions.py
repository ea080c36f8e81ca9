"""The elements of a tensor dealt out to as many regions as there are ranks, evenly wherever the large ones are.

Of every N neighboring tiles (16 elements, one cache line; single elements in tensors too small for that)
each region gets one, in an order that a hash turns: neither a hot stretch nor a hot column falls to one
region. No table and no exchange are needed: places are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvd_gradcomp.ops import rng
from hvd_gradcomp.ops.base import Array, Ops

_TILE_BITS = 4


@dataclass(frozen=True)
class Regions:
    """``count`` regions of ``length`` elements each; what lies beyond the tensor's ``numel`` is zero."""

    numel: int
    count: int

    @property
    def _tile_bits(self) -> int:
        return _TILE_BITS if self.numel >= self.count << _TILE_BITS else 0

    @property
    def _tiles(self) -> int:
        """Tiles of one region."""
        return -(-self.numel // (self.count << self._tile_bits))

    @property
    def length(self) -> int:
        return self._tiles << self._tile_bits

    def split(self, ops: Ops, x: Array) -> Array:
        """float32 ``[numel]`` as ``[count, length]``."""
        size = 1 << self._tile_bits
        tiles = ops.reshape(ops.pad(x, self.count * self.length), (self.count * self._tiles, size))
        region = ops.reshape(ops.arange(self.count), (self.count, 1))
        order = self._tile(ops, region, ops.reshape(ops.arange(self._tiles), (1, self._tiles)))
        return ops.reshape(ops.take(tiles, ops.reshape(order, (-1,))), (self.count, self.length))

    def entries(self, ops: Ops, region: int, places: Array, values: Array) -> tuple[Array, Array]:
        """Index in the tensor, and value, of ``values`` at int32 ``places`` of a region, which are not trusted and
        stay out of range if they are (see :meth:`Ops.scatter_add`). Padding becomes 0 at the last element."""
        bits = self._tile_bits
        tile = self._tile(ops, ops.zeros((1,), "int32") + region, ops.shift_right(places, bits))
        index = ops.shift_left(tile, bits) + ops.bit_and(places, (1 << bits) - 1)
        padding = self.count * self.length - self.numel
        if padding:
            values = ops.where(index < self.numel, values, 0.0)
            index = index - ops.minimum(ops.maximum(index - (self.numel - 1), 0), padding)
        return index, values

    def _tile(self, ops: Ops, region: Array, tile: Array) -> Array:
        """The number in the tensor of a region's tile."""
        turn = ops.shift_right(rng.scramble(ops, tile), 1) % self.count
        return tile * self.count + (region + self.count - turn) % self.count
