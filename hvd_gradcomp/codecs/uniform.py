"""``uniform``: equally spaced levels between the smallest and the largest value of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvd_gradcomp.codecs import blocks
from hvd_gradcomp.codecs.base import Claims, Codec, Ctx, is_int
from hvd_gradcomp.codecs.lanes import Lanes
from hvd_gradcomp.ops import bits as packing
from hvd_gradcomp.ops import rng
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

_TINY = 2.0**-100  # steps and offsets below this are taken as 0: what denormals add to them shows in no code
_HUGE = 2.0**125  # what is above this in magnitude stays in the residual: the range would overflow


@dataclass(frozen=True)
class Uniform(Codec):
    """``q = round((x - min) / s)``, ``s = (max - min) / (2**bits - 1)``; decodes to ``q s + min``.

    Args:
        bits: 1 to 16 per code, packed without gaps.
        block: elements that share a range; None for one range per tensor.
        symmetric: levels ``-L .. L`` times ``max|x| / L``, ``L = 2**(bits - 1) - 1`` (bits >= 2):
            zero stays zero, and a block costs 4 bytes in place of 8.
        stochastic: round up with probability equal to the fraction, so that the mean of the
            decodes is ``x``; values on a level never move, the largest never leaves the range.

    Bytes: ``bits / 8`` per element and 8 (symmetric: 4) per block. Error at most half a step
    (stochastic: one step). Source: blockwise min-max quantization as in Dettmers (2016);
    stochastic rounding as in Alistarh et al. (2017).
    """

    name: ClassVar[str] = "uniform"
    family: ClassVar[str] = "scalar"
    use: ClassVar[str] = "quantize to 1..16 bits; the usual choice from 4 to 8 x"

    bits: int = 8
    block: int | None = 1024
    symmetric: bool = False
    stochastic: bool = False

    def __post_init__(self) -> None:
        self._require(is_int(self.bits, 1, 16), "bits", "a whole number from 1 to 16")
        self._require(self.block is None or is_int(self.block, 1), "block", "a whole number from 1, or None")
        self._require(type(self.symmetric) is bool, "symmetric", "True or False")
        self._require(type(self.stochastic) is bool, "stochastic", "True or False")
        self._require(not self.symmetric or self.bits >= 2, "bits", "at least 2 with symmetric=True")

    @property
    def claims(self) -> Claims:  # type: ignore[override]
        # Symmetric levels contain zero, so no element errs by more than itself. Without a zero level
        # an element errs by up to half a step: |error|^2 <= block * step^2 / 4, while a block's norm^2
        # is at least range^2 / 2.
        narrow = self.block is not None and self.block < 2 * (2**self.bits - 1) ** 2
        return Claims(unbiased=self.stochastic, contraction=not self.stochastic and (self.symmetric or narrow))

    @property
    def vouching(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("step",) if self.symmetric else ("step", "low")

    @property
    def uses_step(self) -> bool:  # type: ignore[override]
        return self.stochastic

    @property
    def _top(self) -> int:
        """The largest code: also the number of steps from the lowest level."""
        return 2 * (2 ** (self.bits - 1) - 1) if self.symmetric else 2**self.bits - 1

    def summed(self, ranks: int) -> Codec | None:
        """As many levels, symmetric, of a step that the ranks share: one for the tensor, whatever ``block`` is."""
        return Lanes(2 ** (self.bits - 1) - 1, self.stochastic, ranks) if self.bits > 1 else None

    def layout(self, spec: TensorSpec) -> Layout:
        codes = Part("codes", packing.packed_nbytes(spec.numel, self.bits), "uint8")
        step = Part("step", blocks.count(spec.numel, self.block), "float32")
        if self.symmetric:
            return (step, codes)
        return (step, Part("low", step.length, "float32"), codes)

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ops, n = ctx.ops, ctx.spec.numel
        x = ops.flush(ops.minimum(ops.maximum(x, -_HUGE), _HUGE))
        rows = blocks.rows(ops, x, self.block, edge=True)
        high, low = ops.max_rows(rows), ops.min_rows(rows)
        if self.symmetric:
            high = ops.maximum(high, -1.0 * low)
            step = ops.flush(ops.divide(high, self._top // 2), _TINY)
            low = -1.0 * (step * (self._top // 2))
        else:
            step = ops.flush(ops.divide(high - low, self._top), _TINY)
            low = ops.flush(low, _TINY)
        level = rows - blocks.spread(ops, low, n, self.block)
        level = level / blocks.spread(ops, ops.where(step > 0.0, step, step + 1.0), n, self.block)
        level = blocks.flat(ops, level, n)
        nearest = ops.rint(level)
        if self.stochastic:
            # A value that stands on a level misses it by a rounding error: such a miss is no fraction.
            on_level = ops.abs(level - nearest) <= self._top * 2.0**-22
            draws = rng.uniform(ops, n, seed=ctx.seed, spec=ctx.spec, step=ctx.state["step"], rank=ctx.rank)
            nearest = ops.where(on_level, nearest, ops.floor(level + draws))
        codes = ops.cast(ops.minimum(ops.maximum(nearest, 0.0), float(self._top)), "int32")
        # A NaN casts to anything: the mask keeps packing in bounds (the step is void anyway).
        codes = ops.bit_and(codes, 2**self.bits - 1)
        # Where all values of a block are equal the step is 0 and any code decodes to `low`.
        parts = {"step": step, "codes": packing.pack(ops, codes, self.bits)}
        return parts if self.symmetric else {**parts, "low": low}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        ops, n = ctx.ops, ctx.spec.numel
        codes = packing.unpack(ops, parts["codes"], n, self.bits)
        step = blocks.spread(ops, parts["step"], n, self.block)
        if self.symmetric:
            codes = codes - self._top // 2
        rows = blocks.rows(ops, ops.cast(codes, "float32"), self.block, edge=False) * step
        if not self.symmetric:
            rows = rows + blocks.spread(ops, parts["low"], n, self.block)
        return ops.accumulate(acc, blocks.flat(ops, rows, n))
