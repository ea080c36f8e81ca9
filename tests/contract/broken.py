"""Codecs, exchanges and operations with one deliberate fault each: what the laws must reject."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from hvd_gradcomp import payload
from hvd_gradcomp.codecs.base import Claims, Codec, Ctx
from hvd_gradcomp.codecs.cast import Bf16, Fp16
from hvd_gradcomp.codecs.topk import TopK
from hvd_gradcomp.codecs.uniform import Uniform
from hvd_gradcomp.exchange.base import Exchange, Received, Rounds, Send
from hvd_gradcomp.exchange.gather import Gather
from hvd_gradcomp.memory.base import Memory
from hvd_gradcomp.memory.error_feedback import ErrorFeedback
from hvd_gradcomp.ops import rng
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec

# -- codecs -------------------------------------------------------------------------------------------------------


class WrongScale(Uniform):
    """Decodes to three times what was meant."""

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return acc + 3.0 * super().decode(parts, ctx.ops.zeros((ctx.spec.numel,)), ctx)


class ClaimsLossless(Bf16):
    """Rounds, but says that it does not: so no residual is kept."""

    claims: ClassVar[Claims] = Claims(lossless=True)


class Overwrites(TopK):
    """Decodes by assignment: of an index that two ranks send, one value is left (case F2)."""

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        acc[parts["indices"]] = parts["values"]
        return acc


class Biased(Uniform):
    """Everything arrives a little too large."""

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return super().decode(parts, acc, ctx) + 0.01


class Noisy(Uniform):
    """Unbiased, but moves values that it could represent."""

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        noise = rng.uniform(ctx.ops, ctx.spec.numel, seed=ctx.seed, spec=ctx.spec, step=ctx.state["step"],
                            rank=ctx.rank, stream=1)
        return super().decode(parts, acc, ctx) + (noise - 0.5)


class LengthFollowsValues(Bf16):
    """Leaves zeros out."""

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        return super().encode(x[x != 0], ctx)


class LengthFollowsRank(Bf16):
    """The last rank sends less."""

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        return super().encode(x[ctx.rank // 2 :], ctx)


class LayoutFollowsName(Bf16):
    """Tensors of one shape get different layouts."""

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("values", spec.numel + len(spec.name), "int16"),)


class DecodesByRank(Fp16):
    """Every rank makes something else of the same sum."""

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return super().decode(parts, acc, ctx) * (1.0 + 1e-6 * ctx.rank)


class MovesStateWhenEncoding(Bf16):
    """Counts its calls in its state, those of void steps too."""

    def state(self, spec: TensorSpec) -> dict[str, tuple[int, str]]:
        return {"calls": (1, "float32")}

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        ctx.state["calls"][0] += 1
        return super().encode(x, ctx)


class ChangesItsInput(Bf16):
    """Rounds the gradient itself."""

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        x *= 0.5
        return super().encode(x, ctx)


@dataclass(frozen=True)
class SumsOwnScales(Codec):
    """Adds codes that every rank made with a scale of its own (case A1)."""

    name: ClassVar[str] = "sums_own_scales"
    family: ClassVar[str] = "scalar"
    claims: ClassVar[Claims] = Claims(summable=True)

    def layout(self, spec: TensorSpec) -> Layout:
        return (Part("scale", 1, "float32"), Part("codes", spec.numel, "int32"))

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        scale = ctx.ops.max_rows(ctx.ops.reshape(ctx.ops.abs(x), (1, ctx.spec.numel))) / 127
        return {"scale": scale, "codes": ctx.ops.cast(ctx.ops.rint(x / (scale + 1e-30)), "int32")}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return acc + ctx.ops.cast(parts["codes"], "float32") * parts["scale"]


class ForgetsItsArguments(Uniform):
    """Its configuration is its name."""

    def config(self) -> dict[str, Any]:
        return {"codec": self.name}


class PrintsAnother(Uniform):
    """Its spec string leaves an argument out."""

    def __str__(self) -> str:
        return f"uniform(bits={self.bits})"


class DependsOnFramework(Uniform):
    """Rounds differently outside numpy."""

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        return super().encode(x if ctx.ops.name == "numpy" else x * (1 + 2.0**-20), ctx)


class TrustsIndices(TopK):
    """Takes any index."""

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        return super().decode({**parts, "indices": parts["indices"] % ctx.spec.numel}, acc, ctx)


class CrashesOnIndices(TopK):
    """Lets the framework find out."""

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        acc[parts["indices"]] += parts["values"]
        return acc


class LooksAtValues(Bf16):
    """Makes a device wait."""

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        return super().encode(x if x.max() > 0 else -1.0 * x, ctx)


class SomethingOutOfNothing(Bf16):
    """Never sends a zero."""

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        return super().encode(x + 1e-3, ctx)


class Overflows(Bf16):
    """Doubles on the way and halves at the end."""

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        decoded = super().decode(parts, ctx.ops.zeros((ctx.spec.numel,)), ctx)
        with np.errstate(over="ignore"):
            return acc + (decoded + decoded) / 2


# -- exchanges ----------------------------------------------------------------------------------------------------


class _Changed(Gather):
    """Gather, up to one change of what comes back."""

    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        received = yield from super().rounds(codec, memory, ctx)
        return self.change(received, memory.load(), ctx)

    def change(self, received: Received, x: Array, ctx: Ctx) -> Received:
        raise NotImplementedError


class LosesResidual(_Changed):
    """Counts everything as sent."""

    def change(self, received: Received, x: Array, ctx: Ctx) -> Received:
        return replace(received, sent=lambda acc: acc + x)


class WrongMean(_Changed):
    """Divides by one rank too many."""

    def change(self, received: Received, x: Array, ctx: Ctx) -> Received:
        return replace(received, mean=lambda acc: received.mean(acc) * (ctx.ranks / (ctx.ranks + 1)))


class OwnFirst(Exchange):
    """Adds in another order on every rank: equal up to rounding, not bitwise."""

    name = "own_first"

    def allows(self, codec: Codec) -> str | None:
        return None

    def rounds(self, codec: Codec, memory: Memory, ctx: Ctx) -> Rounds:
        layout = codec.layout(ctx.spec)
        own = payload.pack(ctx.ops, codec.encode(memory.load(), ctx), layout)
        everyone = (yield Send({"payload": own}, "gather"))["payload"]

        def decode(acc: Array, rank: int) -> Array:
            return codec.decode(payload.unpack(ctx.ops, everyone[rank], layout), acc, replace(ctx, rank=rank))

        def mean(acc: Array) -> Array:
            for i in range(ctx.ranks):
                acc = decode(acc, (ctx.rank + i) % ctx.ranks)
            return acc / np.float32(ctx.ranks)

        return Received(sent=lambda acc: decode(acc, ctx.rank), mean=mean)

    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        return [("gather", payload.nbytes(codec.layout(spec)))]


class MiscountsBytes(Gather):
    """Says that it sends less than it does."""

    def sends(self, codec: Codec, spec: TensorSpec, ranks: int) -> list[tuple[str, int]]:
        return [("gather", payload.nbytes(codec.layout(spec)) - 4)]


EXCHANGES: Mapping[str, Exchange] = {
    "loses_residual": LosesResidual(), "wrong_mean": WrongMean(), "own_first": OwnFirst(),
    "miscounts_bytes": MiscountsBytes()}


# -- array operations and memory ----------------------------------------------------------------------------------


class HidesVoidSteps(NumpyOps):
    """Lets the outputs of a void step through."""

    def poison(self, x: Array, ok: Array) -> Array:
        return np.nan_to_num(x)


class CommitsVoidSteps(NumpyOps):
    """Stores state whatever the verdict is."""

    def assign(self, target: Array, new: Array, ok: Array) -> None:
        target[...] = new

    def host_update(self, function: Any, targets: Any, arrays: Any, ok: Array) -> None:
        function({**arrays, **targets})


def load_unscaled(memory: ErrorFeedback) -> Array:
    """ErrorFeedback.load that forgets the loss scale."""
    return memory.grad + memory.residual


def settle_against_gradient(memory: ErrorFeedback, sent: Array, ok: Array) -> None:
    """ErrorFeedback.settle that subtracts from the raw gradient (case G2)."""
    memory.ops.assign(memory.residual, memory.grad - sent, ok)
