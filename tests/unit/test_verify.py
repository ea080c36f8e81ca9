"""``verify=True``: the same results, and an error that names the rank whose bytes are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_gradcomp import parse
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.exchange import EXCHANGES
from hvd_gradcomp.exchange.base import Send
from hvd_gradcomp.exchange.verified import Verified
from hvd_gradcomp.ops.base import Ops
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.spec import TensorSpec

SHAPES = {"a": (19, 23), "b": (61,), "c": (437,)}
GATHERED = [("uniform(bits=3, stochastic=True)", "gather"), ("topk(ratio=0.1) + uniform(bits=8)", "gather"),
            ("powersgd(rank=2)", "gather"), ("vq(dim=2, codewords=16, codebook='learned', refresh=2)", "gather"),
            ("sign", "two_stage"), ("topk(ratio=0.1)", "sparse_split")]
WHOLE = [*GATHERED, ("powersgd(rank=2)", "sum"), ("fp16", "sum")]


def gradients(ops: Ops, step: int, ranks: int) -> list[dict[str, Any]]:
    def normal(rank: int, i: int) -> Any:
        return np.random.default_rng((step, rank, i)).normal(size=list(SHAPES.values())[i]).astype(np.float32)

    return [{name: ops.constant(normal(rank, i).tolist(), "float32") for i, name in enumerate(SHAPES)}
            for rank in range(ranks)]


class Tampering(LocalWorld):
    """What rank 1 sends is changed on the way, from the second step on."""

    def __init__(self, change: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.change: Any = None
        self._later = change

    def later(self) -> None:
        self.change = self._later

    def _combine(self, sends: list[Send]) -> list[dict[str, Any]]:
        if self.change is not None and sends[0].how in ("gather", "all_to_all"):
            sends = list(sends)
            sends[1] = Send({name: self.change(array.copy()) for name, array in sends[1].parts.items()}, sends[1].how)
        return super()._combine(sends)


def states(world: LocalWorld) -> list[bytes]:
    return [array.tobytes() for plan in world.plans for slot in plan.slots.values() for array in slot.state.values()]


@pytest.mark.parametrize("ops", [NumpyOps(), TorchOps()], ids=lambda ops: ops.name)
@pytest.mark.parametrize(("spec", "exchange"), WHOLE)
def test_changes_no_bit_of_the_results(spec: str, exchange: str, ops: Ops) -> None:
    plain, verified = (LocalWorld(spec, SHAPES, 3, ops=ops, exchange=exchange, verify=verify)
                       for verify in (False, True))
    for step in range(3):
        for one, other in zip(*(world.step(gradients(ops, step, 3)) for world in (plain, verified)), strict=True):
            assert all(np.asarray(one[name]).tobytes() == np.asarray(other[name]).tobytes() for name in SHAPES)


@pytest.mark.parametrize(("spec", "exchange"), WHOLE)
def test_its_bytes_are_counted(spec: str, exchange: str) -> None:
    codec, ranks = parse(spec), 3
    world = LocalWorld(spec, SHAPES, ranks, exchange=exchange, verify=True)
    world.step(gradients(NumpyOps(), 0, ranks))
    carrier = Verified(EXCHANGES[exchange])
    assert world.received_bytes == sum(carrier.received(codec, TensorSpec(name, shape), ranks)
                                       for name, shape in SHAPES.items())


def _flipped(array: Any) -> Any:
    array[len(array) // 3] ^= 16
    return array


def _torn(array: Any) -> Any:
    """The end never arrived; the buffer it went to was zero."""
    array[-len(array) // 2 :] = 0
    return array


def _cut(array: Any) -> Any:
    return array[:-4]


def _enlarged(array: Any) -> Any:
    return np.concatenate([array, array[:4]])


@pytest.mark.parametrize("change", [_flipped, _torn])
@pytest.mark.parametrize(("spec", "exchange"), GATHERED)
def test_wrong_bytes_name_their_rank(spec: str, exchange: str, change: Any) -> None:
    world = Tampering(change, spec, SHAPES, 3, exchange=exchange, verify=True)
    world.step(gradients(NumpyOps(), 0, 3))
    before = states(world)
    world.later()
    with pytest.raises(PayloadError, match=r"'a': the bytes from rank 1 \(of 3"):
        world.step(gradients(NumpyOps(), 1, 3))
    assert states(world) == before, "an error must not move state"


def test_without_verify_a_flipped_bit_passes() -> None:
    """So the test above is one of ``verify``."""
    world = Tampering(_flipped, "uniform(bits=8)", SHAPES, 3, exchange="gather")
    world.later()
    world.step(gradients(NumpyOps(), 0, 3))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("change", [_cut, _enlarged])
def test_another_length_is_an_error(change: Any, verify: bool) -> None:
    """Every rank's alike, so that the transport itself has nothing to complain about."""
    class Changing(LocalWorld):
        def _combine(self, sends: list[Send]) -> list[dict[str, Any]]:
            return super()._combine([Send({name: change(array) for name, array in send.parts.items()}, send.how)
                                     for send in sends])

    world = Changing("uniform(bits=8)", SHAPES, 2, exchange="gather", verify=verify)
    with pytest.raises(PayloadError, match="expected"):
        world.step(gradients(NumpyOps(), 0, 2))


def test_every_flipped_bit_is_found() -> None:
    """Those of the checksum itself too."""
    sizes = Verified(EXCHANGES["gather"]).sends(parse("sign"), TensorSpec("b", (61,)), 2)
    assert sizes == [("gather", 16)]
    for bit in range(8 * 16):
        def flip(array: Any, bit: int = bit) -> Any:
            array[bit // 8] ^= 1 << bit % 8
            return array

        world = Tampering(flip, "sign", {"b": (61,)}, 2, exchange="gather", verify=True)
        world.later()
        with pytest.raises(PayloadError, match="from rank 1"):
            world.step([{"b": np.ones(61, np.float32)}] * 2)


def test_whole_bytes_of_another_rank_or_tensor_are_found() -> None:
    """A transport that mixes up two messages: every byte is right, and in the wrong place."""
    class Mixing(LocalWorld):
        kept: Any = None

        def _combine(self, sends: list[Send]) -> list[dict[str, Any]]:
            if self.kept is None:  # what rank 1 sent of tensor "b"
                Mixing.kept = sends[1]
                return super()._combine(sends)
            return super()._combine([sends[0], self.kept])

    world = Mixing("sign", {"b": (61,), "c": (61,)}, 2, exchange="gather", verify=True)
    with pytest.raises(PayloadError, match="'c': the bytes from rank 1"):
        world.step([{name: np.ones(61, np.float32) for name in "bc"}] * 2)

    class Swapping(LocalWorld):
        def _combine(self, sends: list[Send]) -> list[dict[str, Any]]:
            return super()._combine(sends[::-1])

    with pytest.raises(PayloadError, match="'b': the bytes from rank 0, 1"):
        Swapping("sign", {"b": (61,)}, 2, exchange="gather", verify=True).step([{"b": np.ones(61, np.float32)}] * 2)
