"""``A + B``: B encodes the values that A kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from hvd_gradcomp.codecs.base import Answer, Claims, Codec, Ctx, Received
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
    use: ClassVar[str] = "fewer bytes for the values that the first one keeps"

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
    def first(self) -> Codec:
        """The codec that the values of the tensor go to."""
        return self.codecs[0]

    @property
    def _rest(self) -> Codec:
        return self.codecs[1] if len(self.codecs) == 2 else Chain(self.codecs[1:])

    @property
    def shaped(self) -> bool:  # type: ignore[override]
        return self.first.shaped

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        return self.first.sparse

    @property
    def interactive(self) -> bool:  # type: ignore[override]
        return self.first.interactive

    @property
    def vouching(self) -> tuple[str, ...]:  # type: ignore[override]
        names: list[str] = []
        for name in self.first.vouching:
            if name not in self.first.coded:
                names.append(name)
            elif self._rest.vouching:
                names += [f"{name}/{part}" for part in self._rest.vouching]
            else:
                return ()
        return tuple(names)

    @property
    def summable_rounds(self) -> bool:
        return self.first.summable_rounds and self._rest.summable

    def _inner(self, name: str, length: int, spec: TensorSpec) -> TensorSpec:
        return TensorSpec(f"{spec.name}/{name}", (length,))

    def layout(self, spec: TensorSpec) -> Layout:
        return self._coded_layout(self.first.layout(spec), spec)

    def round_layouts(self, spec: TensorSpec) -> list[Layout]:
        return [self._coded_layout(layout, spec) for layout in self.first.round_layouts(spec)]

    def _coded_layout(self, layout: Layout, spec: TensorSpec) -> Layout:
        parts: list[Part] = []
        for part in layout:
            if part.name in self.first.coded:
                inner = self._rest.layout(self._inner(part.name, part.length, spec))
                parts += [p._replace(name=f"{part.name}/{p.name}") for p in inner]
            else:
                parts.append(part)
        return tuple(parts)

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        return self.code(self.first.encode(x, ctx), ctx)

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return self.first.decode(self.uncode(parts, ctx), acc, ctx)

    def entries(self, parts: Parts, ctx: Ctx) -> tuple[Array, Array]:
        return self.first.entries(self.uncode(parts, ctx), ctx)

    def rounds(self, load: Callable[[], Array], ctx: Ctx) -> Generator[Parts, Answer, Received]:
        """Those of the first codec, each payload coded by the rest."""
        rounds = self.first.rounds(load, ctx)
        parts = next(rounds)
        while True:
            lengths = {name: int(array.shape[0]) for name, array in parts.items()}
            own, received = yield self.code(parts, ctx)
            decoded = [self.uncode(each, replace(ctx, rank=rank) if len(received) > 1 else ctx, lengths=lengths)
                       for rank, each in enumerate(received)]
            try:
                parts = rounds.send((self.uncode(own, ctx, lengths=lengths), decoded))
            except StopIteration as end:
                return end.value

    def state(self, spec: TensorSpec) -> dict[str, tuple[int, str]]:
        return self.first.state(spec)

    def code(self, parts: Parts, ctx: Ctx, encode: Callable[[Codec, Array, Ctx], Parts] | None = None) -> Parts:
        """The payload of the first codec, its values encoded by the rest (through ``encode`` if it is given)."""
        coded: dict[str, Array] = {}
        for name, array in parts.items():
            if name in self.first.coded:
                inner = self._inner_ctx(name, int(array.shape[0]), ctx)
                codes = encode(self._rest, array, inner) if encode else self._rest.encode(array, inner)
                coded |= {f"{name}/{part}": each for part, each in codes.items()}
            else:
                coded[name] = array
        return coded

    def uncode(self, coded: Parts, ctx: Ctx, decode: Callable[[Codec, Parts, Array, Ctx], Array] | None = None,
               lengths: Mapping[str, int] | None = None) -> Parts:
        """The way back from :meth:`code`. ``lengths`` are those of the first codec's parts in a round of several."""
        if lengths is None:
            lengths = {part.name: part.length for part in self.first.layout(ctx.spec)}
        parts: dict[str, Array] = {}
        for name, length in lengths.items():
            if name in self.first.coded:
                inner = self._inner_ctx(name, length, ctx)
                codes = {part.name: coded[f"{name}/{part.name}"] for part in self._rest.layout(inner.spec)}
                zeros = ctx.ops.zeros((length,))
                parts[name] = (decode(self._rest, codes, zeros, inner) if decode
                               else self._rest.decode(codes, zeros, inner))
            else:
                parts[name] = coded[name]
        return parts

    def _inner_ctx(self, name: str, length: int, ctx: Ctx) -> Ctx:
        return replace(ctx, spec=self._inner(name, length, ctx.spec), buffers=ctx.buffers.setdefault(name, {}))

    def config(self) -> dict[str, Any]:
        return {"codec": self.name, "codecs": [codec.config() for codec in self.codecs]}

    def __str__(self) -> str:
        return " + ".join(map(str, self.codecs))
