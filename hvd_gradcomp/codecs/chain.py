"""``A + B``: B encodes the values that A kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from hvd_gradcomp.codecs.base import Claims, Codec, Ctx
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class Chain(Codec):
    """Codecs in a row: each encodes the float32 values in the payload of the one before it.

    One error feedback goes around the whole, so what any of them loses is sent later.
    Written with ``+`` in a spec string. Bytes: those of the first without its values, and those
    of the rest for the values.
    """

    name: ClassVar[str] = "+"
    family: ClassVar[str] = "combined"

    codecs: tuple[Codec, ...] = ()

    def __post_init__(self) -> None:
        if len(self.codecs) < 2:
            raise SpecError("a chain needs at least two codecs")
        for first, second in pairwise(self.codecs):
            if not first.coded:
                raise SpecError(f"{first} + {second}: {first.name} has no values that another codec "
                                "could encode; put a sparse or low-rank codec first")
            if second.state(TensorSpec("", (1,))):
                raise SpecError(f"{first} + {second}: {second} keeps a state of its own, which only works as the "
                                "first of a chain")

    @property
    def claims(self) -> Claims:  # type: ignore[override]
        each = [codec.claims for codec in self.codecs]
        return Claims(lossless=all(c.lossless for c in each), unbiased=all(c.unbiased for c in each),
                      contraction=all(c.contraction for c in each), summable=all(c.summable for c in each))

    @property
    def uses_step(self) -> bool:  # type: ignore[override]
        return any(codec.uses_step for codec in self.codecs)

    @property
    def _first(self) -> Codec:
        return self.codecs[0]

    @property
    def _rest(self) -> Codec:
        return self.codecs[1] if len(self.codecs) == 2 else Chain(self.codecs[1:])

    def _inner(self, part: Part, spec: TensorSpec) -> TensorSpec:
        return TensorSpec(f"{spec.name}/{part.name}", (part.length,))

    def layout(self, spec: TensorSpec) -> Layout:
        parts: list[Part] = []
        for part in self._first.layout(spec):
            if part.name in self._first.coded:
                inner = self._rest.layout(self._inner(part, spec))
                parts += [replace(p, name=f"{part.name}/{p.name}") for p in inner]
            else:
                parts.append(part)
        return tuple(parts)

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        parts = self._first.encode(x, ctx)
        for part in self._first.layout(ctx.spec):
            if part.name in self._first.coded:
                inner = replace(ctx, spec=self._inner(part, ctx.spec))
                coded = self._rest.encode(parts.pop(part.name), inner)
                parts.update({f"{part.name}/{name}": array for name, array in coded.items()})
        return parts

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        outer = dict(parts)
        for part in self._first.layout(ctx.spec):
            if part.name in self._first.coded:
                inner = replace(ctx, spec=self._inner(part, ctx.spec))
                names = [p.name for p in self._rest.layout(inner.spec)]
                coded = {name: outer.pop(f"{part.name}/{name}") for name in names}
                outer[part.name] = self._rest.decode(coded, ctx.ops.zeros((part.length,)), inner)
        return self._first.decode(outer, acc, ctx)

    def config(self) -> dict[str, Any]:
        return {"codec": self.name, "codecs": [codec.config() for codec in self.codecs]}

    def __str__(self) -> str:
        return " + ".join(map(str, self.codecs))
