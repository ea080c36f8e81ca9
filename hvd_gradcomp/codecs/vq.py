"""``vq``: stretches of values as the index of the nearest vector of a codebook."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.codecs.base import Claims, Codec, Ctx, is_int
from hvd_gradcomp.ops import bits as packing
from hvd_gradcomp.ops import exact, rng
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

_CODEBOOKS = ("fixed", "learned")
_RANGE = 12  # a codeword's elements reach this many times the group's root mean square
_AXIS = 1.5  # length of the pinned codewords along the axes, in root mean squares: below 2, see claims
_SAMPLE = 16384  # segments that a refit looks at: their sums stay exact in float32
_OLD = 16.0  # weight of a learned codeword as it is, in segments
_ROUNDS = 10  # of Lloyd's iteration for the fixed codebook


@dataclass(frozen=True)
class Vq(Codec):
    """Segments of ``dim`` values, each sent as the index of the nearest of ``codewords`` vectors.

    The segments of one block share a scale. To find the nearest codeword the block is divided by its
    root mean square and rounded to integers small enough for every sum to be exact; codewords are
    integers too. So any order of additions, and any device's matrix unit, gives the same index (of
    equally near codewords the lowest). The scale that is sent is the one with which the chosen
    codewords fit best, ``<x, q> / <q, q>``.

    The fixed codebook is the result of Lloyd's iteration on samples of a Laplace distribution, drawn
    and computed in exact steps at first use: in a second for 256 codewords, some ten for 4,096. Zero and, from
    ``4 dim`` codewords, the axes are among them and never move.

    A learned codebook starts there and follows the tensor: each step one ``refresh``-th of the
    codewords move towards the mean of the segments (of gradient plus residual, 16,384 sampled) that
    chose them. Every rank sends its result and all take the mean of it: one turn of Lloyd's
    iteration every ``refresh`` steps, whose bytes are the same in every step. Because the indices
    are exact, so is the codebook: all ranks hold the same bits.

    Args:
        dim: values per segment, 1 to 64.
        codewords: a power of two from 2 to 4096.
        codebook: ``"fixed"``, or ``"learned"``: per tensor, 4 ``dim codewords`` bytes of state.
        refresh: steps from one refit of a codeword to the next.
        block: values that share a scale (rounded up to whole segments); None for one per tensor.

    Bytes: ``log2(codewords) / (8 dim)`` per element and 4 per block; learned: ``2 dim
    ceil(codewords / refresh)`` per tensor more. Time: ``codewords`` multiplications per element.
    Limits: blocks whose largest magnitude is below 2**-80 count as zeros. Source: vector quantization
    with Lloyd's algorithm as in Linde, Buzo and Gray (1980), Jegou et al. (2011); for gradients Yu
    et al. (2018), Dai et al. (2019).
    """

    name: ClassVar[str] = "vq"
    family: ClassVar[str] = "vector"
    use: ClassVar[str] = "whole segments by their nearest codeword; learned or fixed"

    dim: int = 8
    codewords: int = 256
    codebook: str = "fixed"
    refresh: int = 64
    block: int | None = 1024

    def __post_init__(self) -> None:
        self._require(is_int(self.dim, 1, 64), "dim", "a whole number from 1 to 64")
        self._require(is_int(self.codewords, 2, 4096) and self.codewords & (self.codewords - 1) == 0,
                      "codewords", "a power of two from 2 to 4096")
        self._require(self.codebook in _CODEBOOKS, "codebook", f"one of {_CODEBOOKS}")
        self._require(is_int(self.refresh, 1), "refresh", "a whole number from 1")
        self._require(self.block is None or is_int(self.block, 1), "block", "a whole number from 1, or None")

    @property
    def claims(self) -> Claims:  # type: ignore[override]
        # Some value of a block is at least its root mean square, so an axis below twice that length
        # is nearer to its segment than zero is; no segment does worse than zero.
        return Claims(contraction=_pinned(self.dim, self.codewords) > 1)

    @property
    def uses_step(self) -> bool:  # type: ignore[override]
        return self.codebook == "learned"

    @property
    def _bits(self) -> int:
        return self.codewords.bit_length() - 1

    @property
    def _moved(self) -> int:
        """Codewords that are refit in one step."""
        return math.ceil(self.codewords / self.refresh)

    def _sizes(self, n: int) -> tuple[int, int, int]:
        """(elements of a block, blocks, segments)."""
        segments = math.ceil(n / self.dim)
        width = segments if self.block is None else math.ceil(self.block / self.dim)
        return width * self.dim, math.ceil(segments / width), segments

    def layout(self, spec: TensorSpec) -> Layout:
        _, count, segments = self._sizes(spec.numel)
        parts = (Part("scale", count, "float32"),
                 Part("codes", packing.packed_nbytes(segments, self._bits), "uint8"))
        if self.codebook == "learned":
            return (*parts, Part("moved", self._moved * self.dim, "int16"))
        return parts

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops, n = ctx.ops, ctx.spec.numel
        width, count, segments = self._sizes(n)
        rows = blocks.rows(ops, x, width, edge=False)
        down, up = blocks.powers(ops, ops.max_rows(ops.abs(rows)))
        rows = rows * ops.reshape(down, (count, 1))
        squares = ops.maximum(ops.sum_rows(rows * rows), 1.0)
        in_last = n - (count - 1) * width
        means = ops.concat([squares[:-1] / ops.scalar(width), squares[-1:] / ops.scalar(in_last)])
        unit = exact.root(ops, means) / ops.scalar(_unit(self.dim))
        reach = float(_reach(self.dim))
        whole = ops.minimum(ops.maximum(ops.rint(rows / ops.reshape(unit, (count, 1))), -reach), reach)
        whole = ops.reshape(whole, (count * width // self.dim, self.dim))
        book = self._book(ctx)
        codes = _nearest(ops, whole, book)
        chosen = ops.reshape(ops.take(book, codes), (count, width))
        scale = ops.sum_rows(rows * chosen) / ops.maximum(ops.sum_rows(chosen * chosen), 1.0) * up
        parts = {"scale": ops.minimum(scale, blocks.HUGE / reach),
                 "codes": packing.pack(ops, codes[:segments], self._bits)}
        return parts | ({"moved": self._refit(whole, codes, book, ctx)} if self.codebook == "learned" else {})

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops, n = ctx.ops, ctx.spec.numel
        width, count, segments = self._sizes(n)
        codes = ops.pad(packing.unpack(ops, parts["codes"], segments, self._bits), count * width // self.dim)
        rows = ops.reshape(ops.take(self._book(ctx), codes), (count, width))
        return ops.accumulate(acc, blocks.flat(ops, rows * ops.reshape(parts["scale"], (count, 1)), n))

    # -- the learned codebook ---------------------------------------------------------------------

    def state(self, spec: TensorSpec) -> dict[str, tuple[int, str]]:
        """``codebook``: what was learned, as the difference from the fixed codebook."""
        return {"codebook": (self.codewords * self.dim, "float32")} if self.codebook == "learned" else {}

    def advance(self, received: Parts, ctx: Ctx) -> dict[str, Array]:
        if self.codebook == "fixed":
            return {}
        ops, reach = ctx.ops, float(_reach(self.dim))
        means = ops.cast(received["moved"][0], "float32")
        for rank in range(1, ctx.ranks):
            means = means + ops.cast(received["moved"][rank], "float32")
        new = ops.minimum(ops.maximum(ops.rint(means / ops.scalar(ctx.ranks)), -reach), reach)
        turn = self._turn(ctx)
        old = ops.reshape(ops.take(self._book(ctx), turn), (self._moved * self.dim,))
        change = _add_rows(ops, ops.reshape(new - old, (self._moved, self.dim)), turn, self.codewords)
        return {"codebook": ctx.state["codebook"] + ops.reshape(change, (self.codewords * self.dim,))}

    def _book(self, ctx: Ctx) -> Array:
        """The codebook, float32 ``[codewords, dim]`` of integers."""
        book = ctx.ops.constant(_fixed(self.dim, self.codewords), "float32")
        if self.codebook == "fixed":
            return book
        return book + ctx.ops.reshape(ctx.state["codebook"], (self.codewords, self.dim))

    def _turn(self, ctx: Ctx) -> Array:
        """Indices of the codewords whose turn it is, int32 ``[moved]``."""
        return ctx.ops.bit_and(ctx.state["step"] * self._moved + ctx.ops.arange(self._moved), self.codewords - 1)

    def _refit(self, whole: Array, codes: Array, book: Array, ctx: Ctx) -> Array:
        """Where this rank's segments would have those codewords, int16 ``[moved * dim]``."""
        ops, segments = ctx.ops, self._sizes(ctx.spec.numel)[2]
        if segments > _SAMPLE:
            places = rng.sample(ops, segments, _SAMPLE, seed=ctx.seed, spec=ctx.spec, step=ctx.state["step"],
                                rank=ctx.rank)
            whole, codes = ops.take(whole, places), ops.take(codes, places)
        turn = self._turn(ctx)
        old, means = ops.take(book, turn), ops.take(_means(ops, whole, codes, book, _OLD), turn)
        movable = ops.reshape(ops.cast(turn >= _pinned(self.dim, self.codewords), "float32"), (self._moved, 1))
        return ops.cast(ops.reshape(old + movable * (means - old), (self._moved * self.dim,)), "int16")


def _reach(dim: int) -> int:
    """Largest magnitude of the integers: ``x . c - |c|^2 / 2`` then is exact in float32 in halves."""
    return min(2047, math.isqrt(2**24 // (3 * dim)))


def _unit(dim: int) -> int:
    """The integer that stands for the root mean square."""
    return _reach(dim) // _RANGE


def _pinned(dim: int, codewords: int) -> int:
    """The first codewords, which never move: zero, and both directions of each axis if there is room."""
    return 1 + 2 * dim if codewords >= 4 * dim else 1


def _nearest(ops: Ops, segments: Array, book: Array) -> Array:
    return ops.best_rows(segments, book, ops.sum_rows(book * book) * 0.5)


def _add_rows(ops: Ops, rows: Array, places: Array, n: int) -> Array:
    """``[n, dim]`` with ``rows`` added at ``places``."""
    count, dim = int(rows.shape[0]), int(rows.shape[1])
    elements = ops.reshape(places * dim, (count, 1)) + ops.reshape(ops.arange(dim), (1, dim))
    flat = ops.scatter_add(ops.zeros((n * dim,)), ops.reshape(elements, (count * dim,)),
                           ops.reshape(rows, (count * dim,)))
    return ops.reshape(flat, (n, dim))


def _means(ops: Ops, segments: Array, codes: Array, book: Array, weight: float) -> Array:
    """One turn of Lloyd's iteration: the mean of each codeword's segments, rounded, the codeword
    itself counting as ``weight`` of them."""
    codewords = int(book.shape[0])
    ones = ops.zeros((int(segments.shape[0]), 1)) + 1.0
    counts = _add_rows(ops, ones, codes, codewords)
    return ops.rint((weight * book + _add_rows(ops, segments, codes, codewords)) / (weight + counts))


@lru_cache(maxsize=8)
def _fixed(dim: int, codewords: int) -> tuple[tuple[float, ...], ...]:
    """The fixed codebook. Always made by the same operations, on numpy, all of them exact or IEEE."""
    from hvd_gradcomp.ops.numpy import NumpyOps

    ops: Ops = NumpyOps()
    samples = min(64 * codewords, 32768)
    spec, step = TensorSpec("vq", (samples * dim,)), ops.constant([0], "int32")
    bits = rng.random_bits(ops, samples * dim, seed=0, spec=spec, step=step, rank=rng.SHARED)
    uniform = (ops.cast(ops.shift_right(bits, 9), "float32") + 0.5) * 2.0**-23
    sign = ops.cast(1 - 2 * ops.bit_and(bits, 1), "float32")
    laplace = sign * exact.log(ops, uniform) * (_unit(dim) * math.sqrt(0.5))
    segments = ops.reshape(ops.minimum(ops.maximum(ops.rint(laplace), -_reach(dim)), _reach(dim)), (samples, dim))
    length = round(_AXIS * _unit(dim))
    axes = [[length * sign * (i == axis) for i in range(dim)] for axis in range(dim) for sign in (1, -1)]
    fixed = ops.constant([[0] * dim, *axes][: _pinned(dim, codewords)], "float32")
    book = ops.concat([fixed, segments[: codewords - len(fixed)]])
    for _ in range(_ROUNDS):
        book = ops.concat([fixed, _means(ops, segments, _nearest(ops, segments, book), book, 1.0)[len(fixed) :]])
    return tuple(tuple(float(value) for value in row) for row in book)
