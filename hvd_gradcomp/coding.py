"""Encode, decode and settle: a codec's own operations, or a native kernel that gives the same bytes."""

from __future__ import annotations

from hvd_gradcomp.codecs.base import Codec, Ctx, Received
from hvd_gradcomp.memory.base import Memory
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Parts


def encode(codec: Codec, memory: Memory, ctx: Ctx) -> Parts:
    """The payload of what ``memory`` loads; nothing is written."""
    return codec.encode(memory.load(), ctx)


def decode(codec: Codec, parts: Parts, acc: Array, ctx: Ctx) -> Array:
    """``acc + decoded values``; ``acc`` is used up."""
    return codec.decode(parts, acc, ctx)


def settle(received: Received, memory: Memory, ctx: Ctx, ok: Array) -> None:
    """Let ``memory`` keep what this rank's payload does not hold, if the step counts."""
    if memory.keeps:
        memory.settle(received.sent(ctx.ops.zeros((ctx.spec.numel,))), ok)
