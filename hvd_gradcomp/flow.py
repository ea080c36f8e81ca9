"""The way of a gradient, on one screen.

A generator: it yields what is to be combined over the ranks and is resumed with the result, so
one definition serves torch (asynchronous), TensorFlow (traced once into the graph), mpi4py and
the lockstep world of the tests.
"""

from __future__ import annotations

from collections.abc import Callable

from hvd_gradcomp import coding
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.exchange.base import Commit, Flow
from hvd_gradcomp.memory import Momentum, remember
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.plan import Slot

STEP = "step"


def reduce_gradient(grad: Array, slot: Slot, ctx: Ctx, *, stage: int = 0, loss_scale: Array | float | None = None,
                    sgd: Momentum | None = None, output: Callable[[bool], Array] | None = None) -> Flow:
    """Reduce one gradient to its mean over the ranks, compressed.

    Args:
        grad: float32 ``[numel]``; only read, until ``output`` is called.
        slot: the tensor's codecs, exchanges and state.
        stage: which of the slot's stages this step is in, the same on all ranks.
        loss_scale: what the loss was multiplied by.
        sgd: the optimizer's momentum, if the slot's state holds a velocity.
        output: ``output(clear)`` gives the float32 array ``[numel]`` that the mean is decoded into, zeros if
            ``clear``, called after the last read of ``grad`` (it may be the same storage); a new array by default.

    Returns:
        The mean, float32 ``[numel]``, with momentum if the slot has a velocity; NaN everywhere if the
        step's verdict is 0. Such a void step changes no bit of ``slot.state``.
    """
    ops, state = ctx.ops, slot.state
    codec, exchange = slot.stages[stage].codec, slot.stages[stage].exchange
    memory = remember(ops, grad, state, loss_scale, sgd=sgd, dense=codec.lossless, ranks=ctx.ranks)

    received = yield from exchange.rounds(codec, memory, ctx)
    ok = yield Commit()
    coding.settle(received, memory, ctx, ok)
    mean = received.mean(output(not received.covers) if output else ops.zeros((ctx.spec.numel,)))
    result = memory.result(mean, ok)
    # The codec's own state moves last: sent and mean are decoded with the state they were encoded with.
    for name, new in received.state().items():
        ops.assign(state[name], new, ok)
    if STEP in state:
        ops.assign(state[STEP], state[STEP] + 1, ok)
    return ops.poison(result, ok)
