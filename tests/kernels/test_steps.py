"""Several steps: what is kept from one to the next is as much as in the first, and payloads are not mixed up."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_gradcomp.collectives.local import LocalWorld
from tests.contract import values
from tests.contract.backends import NUMPY, TENSORFLOW, TORCH, Backend
from tests.kernels.world import pure

CASES = [("uniform(bits=8)", "gather"), ("uniform(bits=8)", "sum"), ("uniform(bits=8)", "two_stage"),
         ("topk(ratio=0.1)", "sparse_split"), ("topk(ratio=0.1) + uniform(bits=8)", "gather"), ("fp16", "sum")]
N = 3000


@pytest.mark.parametrize(("spec", "exchange"), CASES)
def test_buffers_do_not_grow(spec: str, exchange: str) -> None:
    world = LocalWorld(spec, {"w": (N,)}, 2, exchange=exchange)
    counts = []
    for step in range(5):
        world.step([{"w": values.normal(f"{step} {rank}", (N,))} for rank in range(2)])
        counts.append(_buffers(world.plans[0].slots["w"].buffers))
    assert counts[-1] == counts[1] > 0


def _buffers(buffers: dict) -> int:
    return sum(_buffers(each) if isinstance(each, dict) else 1 for each in buffers.values())


@pytest.mark.parametrize("backend", [NUMPY, TORCH, TENSORFLOW], ids=str)
@pytest.mark.parametrize(("spec", "exchange"), CASES[:1] + CASES[4:])
def test_steps_give_the_same_bits_as_without_kernels(backend: Backend, spec: str, exchange: str) -> None:
    def steps(backend: Backend) -> list[bytes]:
        world = LocalWorld(spec, {"w": (N,)}, 2, ops=backend.ops, exchange=exchange, state=backend.state)
        outs = [world.step([{"w": backend.array(values.normal(f"{step} {rank}", (N,)))} for rank in range(2)])
                for step in range(3)]
        return [np.array(backend.numpy(out[1]["w"])).tobytes() for out in outs]

    with pure():
        expected = steps(NUMPY)
    assert steps(backend) == expected
