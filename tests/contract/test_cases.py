"""Cases that broke somebody's training elsewhere, with the right values worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import ArrayLike

from hvd_gradcomp import parse
from hvd_gradcomp.agreement import check
from hvd_gradcomp.codecs.topk import TopK
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import DisagreementError, PayloadError, SpecError
from hvd_gradcomp.spec import TensorSpec
from tests.contract import laws, values
from tests.contract.backends import BACKENDS, NUMPY, Backend
from tests.contract.specs import ALL, COMPRESSING
from tests.contract.values import Floats, Grads

SENDS_EVERY_ELEMENT = [spec for spec in ALL if parse(spec).family in ("cast", "scalar")
                       and parse(spec).name not in ("qsgd", "natural")]
"""Those that send constants as they are. The two others round them up or down by chance."""


class World:
    """Ranks with one tensor ``x`` each."""

    def __init__(self, spec: str, ranks: int, n: int, exchange: str = "auto") -> None:
        self.world = LocalWorld(spec, {"x": (n,)}, ranks, exchange=exchange)
        self.given = np.zeros(n)
        self.received = np.zeros(n)

    def step(self, *grads: ArrayLike) -> Floats:
        """One gradient per rank in; the output of every rank, which must be the same bits."""
        arrays = [np.array(grad, np.float32) for grad in grads]
        outs: list[Floats] = [out["x"] for out in self.world.step([{"x": array} for array in arrays])]
        assert all(out.tobytes() == outs[0].tobytes() for out in outs)
        self.given += np.mean(np.array(arrays, np.float64), axis=0)
        self.received += outs[0]
        return outs[0]

    @property
    def residuals(self) -> list[Floats]:
        return [plan.slots["x"].state["residual"] for plan in self.world.plans]

    def missing(self) -> float:
        """Identity T: what neither arrived nor is kept."""
        kept = np.mean(np.array(self.residuals, np.float64), axis=0)
        return float(np.abs(self.received + kept - self.given).max())


def test_a1_codes_of_different_scale_are_not_averaged() -> None:
    out = World("uniform(bits=8)", 2, 10).step([1.0] * 10, [0.01] * 10)
    assert np.abs(out - 0.505).max() <= 0.00199


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a1_codes_do_not_wrap_in_the_sum(ranks: int) -> None:
    grads = [[120 / 127, 1.0, -1.0] if rank % 2 else [100 / 127, 1.0, -1.0] for rank in range(ranks)]
    out = World("uniform(bits=8, symmetric=True)", ranks, 3).step(*grads)
    assert np.allclose(out, [110 / 127, 1.0, -1.0], rtol=1e-6)


@pytest.mark.parametrize(("exchange", "ranks"), [("sum", 4), ("sum", 300), ("gather", 4), ("gather", 41)])
def test_a2_fp16_does_not_overflow(exchange: str, ranks: int) -> None:
    out = World("fp16", ranks, 4, exchange).step(*[[20000.0] * 4] * ranks)
    assert np.allclose(out, 20000.0, rtol=ranks * 2.0**-11)


@pytest.mark.parametrize("ranks", [4, 41, 300])
def test_a2_fp16_does_not_flush(ranks: int) -> None:
    """The nearest half precision to 1e-7 is 1.19e-7: right is that or nearer."""
    out = World("fp16", ranks, 4).step(*[[1e-7] * 4] * ranks)
    assert np.abs(out - 1e-7).max() <= 0.2e-7


def test_a2_gathered_fp16_keeps_what_it_flushes() -> None:
    """Without the bound that ``sum`` exchanges, small values wait in the residual until they can be sent."""
    world = World("fp16", 4, 4, "gather")
    for _ in range(20):
        world.step(*[[1e-7] * 4] * 4)
    assert world.received.all()
    assert world.missing() <= 1e-12


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("spec", COMPRESSING)
def test_b1_training_goes_on_after_one_inf(spec: str, bad: float) -> None:
    world = World(spec, 2, 40)
    poisoned = np.ones(40, np.float32)
    poisoned[3] = bad
    with np.errstate(all="ignore"):
        outs = world.world.step([{"x": poisoned}, {"x": np.ones(40, np.float32)}])
    assert not any(np.isfinite(out["x"]).any() for out in outs)
    assert not any(residual.any() for residual in world.residuals)
    for _ in range(4):
        assert np.isfinite(world.step(np.ones(40), np.ones(40))).all()
    assert np.array_equal(world.given, np.full(40, 4.0))
    assert world.missing() <= (1e-2 if "fp16" in spec else 1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("spec", SENDS_EVERY_ELEMENT)
def test_c1_zeros_ones_and_constants(spec: str, ranks: int) -> None:
    for n in (1, 3, 7, 1025):
        shapes = {"x": (n,)}
        ones = [{"x": np.full(n, float(rank == 1), np.float32)} for rank in range(ranks)]
        threes = [{"x": np.full(n, 3.0, np.float32)} for rank in range(ranks)]
        for grads, right in ((ones, min(1, ranks - 1) / ranks), (threes, 3.0)):
            out = LocalWorld(spec, shapes, ranks).step(grads)[0]["x"]
            assert np.allclose(out, right, rtol=1e-6, atol=0.0), f"{n}: {out[:3]} in place of {right}"


def test_c1_small_values_keep_their_precision() -> None:
    x = 1e-6 * np.array([1.0, -0.7, 0.3, 0.0, -1.0])
    out = World("uniform(bits=8)", 2, 5).step(x, x)
    assert np.abs(out - x).max() <= 1e-6 / 254 * 1.01


@pytest.mark.parametrize("numel", [1, 3, 10])
@pytest.mark.parametrize("ratio", [1e-6, 0.01, 0.3, 1.0, 1])
def test_c4_k_is_between_one_and_all(ratio: float, numel: int) -> None:
    assert 1 <= TopK(ratio).k(numel) <= numel
    grads = [values.normal(f"c4/{rank}", (numel,)) for rank in range(2)]
    out = World(f"topk(ratio={ratio})", 2, numel).step(*grads)
    assert out.any()
    if ratio == 1:
        assert np.array_equal(out, (grads[0] + grads[1]) / np.float32(2))


@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.28, 1.0000001, float("nan"), float("inf"), True, "0.1", None])
def test_c4_impossible_ratios_are_refused(ratio: object) -> None:
    with pytest.raises(SpecError, match="topk: ratio must be above 0 and at most 1"):
        TopK(ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["sign", "sign(block=None)"])
def test_c7_sign_of_zero_is_plus(spec: str) -> None:
    for zero in (0.0, -0.0):
        world = World(spec, 1, 4)
        assert world.step([zero, zero, 4.0, zero]).tolist() == [1.0, 1.0, 1.0, 1.0]
        assert world.residuals[0].tolist() == [-1.0, -1.0, 3.0, -1.0]
        assert world.missing() == 0.0


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_c7_sign_bytes_are_the_same_everywhere(backend: Backend) -> None:
    blob = laws.Single(parse("sign"), 4, backend).encode(np.array([0.0, -0.0, 4.0, -4.0], np.float32))
    scale, signs = np.array([2.0], "<f4").tobytes(), bytes([0b0111, 0, 0, 0])
    assert blob.tobytes() == scale + signs


def test_c7_a_tie_of_votes_is_decided_alike() -> None:
    assert World("sign", 2, 3).step([1.0] * 3, [-1.0] * 3).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_f2_the_same_index_from_several_ranks_is_added(ranks: int) -> None:
    """Right with two ranks: 2.0."""
    grads = np.zeros((ranks, 10), np.float32)
    grads[0, 7], grads[1, 7] = 1.0, 3.0
    if ranks == 4:
        grads[2, 7], grads[3, 2] = 4.0, 8.0
    out = World("topk(ratio=0.1)", ranks, 10).step(*grads)
    right = np.zeros(10)
    right[7], right[2] = (2.0, 0.0) if ranks == 2 else (2.0, 2.0)
    assert out.tolist() == right.tolist()


def test_g1_what_was_not_sent_is_sent_later() -> None:
    world = World("topk(ratio=0.5)", 1, 2)
    steps = [(world.step([1.0, 0.9]), world.residuals[0].copy()) for _ in range(3)]
    sent = [[1.0, 0.0], [0.0, 1.8], [2.0, 0.0]]
    kept = [[0.0, 0.9], [1.0, 0.0], [0.0, 0.9]]
    assert np.allclose([out for out, _ in steps], sent, rtol=1e-6)
    assert np.allclose([residual for _, residual in steps], kept, rtol=1e-6)


def test_g1_without_memory_it_never_is() -> None:
    world = LocalWorld("topk(ratio=0.5)", {"x": (2,)}, 1, error_feedback=False)
    assert [world.step([{"x": np.array([1.0, 0.9], np.float32)}])[0]["x"][1] for _ in range(3)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("spec", COMPRESSING)
def test_g7_nothing_is_lost_between_rare_gradients(spec: str) -> None:
    def rarely(step: int, ranks: int, shapes: laws.Shapes) -> Grads:
        grads = values.gradients(step, ranks, shapes)
        return grads if step % 5 == 0 else [{name: 0 * g for name, g in each.items()} for each in grads]

    laws.conserves(parse(spec), 2, steps=11, grads=rarely)


@pytest.mark.parametrize(("mine", "theirs"), [
    ("uniform(bits=8)", "uniform(bits=4)"), ("topk(ratio=0.1)", "topk(ratio=0.2)"), ("sign", "sign(block=64)"),
    ("fp16", "uniform(bits=8)")])
def test_g7_ranks_of_different_configuration_are_told(mine: str, theirs: str) -> None:
    """Every rank gets the error, before anything is exchanged; and the lengths would not fit either."""
    x = values.normal("g7", (300,))
    with pytest.raises(PayloadError, match=r"expected .* bytes"):
        laws.Single(parse(theirs), 300).decode(laws.Single(parse(mine), 300).encode(x), x)
    plans = [LocalWorld(spec, {"x": (300,)}, 1).plans[0] for spec in (mine, mine, theirs)]
    for plan in plans:
        answers = iter([[each.digest() for each in plans], [json.dumps(each.describe()).encode() for each in plans]])

        def gather(mine: bytes, answers: Iterator[list[bytes]] = answers) -> list[bytes]:
            return next(answers)

        with pytest.raises(DisagreementError, match="rank 2"):
            check(plan, gather)


@pytest.mark.parametrize("spec", [spec for spec in COMPRESSING if parse(spec).family in ("cast", "scalar", "sparse")])
def test_the_largest_float_does_not_overflow(spec: str) -> None:
    """Codecs of the other families may send a value of the other sign, which leaves more than there was."""
    largest = float(np.finfo(np.float32).max)
    world = World(spec, 2, 40)
    for grads in ([largest, -largest, 1.0, 0.0] * 10, [0.0] * 40):
        assert np.isfinite(world.step(grads, [0.0] * 40)).all()
        assert np.isfinite(world.residuals[0]).all()


def test_the_layout_of_a_scalar_and_of_one_element() -> None:
    """Case C3: a learned temperature of shape () travels as any other tensor."""
    for spec in SENDS_EVERY_ELEMENT:
        world = LocalWorld(spec, {"temperature": ()}, 2)
        outs = world.step([{"temperature": np.float32(g).reshape(())} for g in (1.0, 3.0)])
        assert [out["temperature"].shape for out in outs] == [(), ()]
        assert np.allclose([out["temperature"] for out in outs], 2.0, rtol=1e-6), spec
    assert parse("none").layout(TensorSpec("temperature", ()))[0].length == 1
    assert NUMPY.ops.all_finite(np.zeros(0, np.float32)).tolist() == [1.0]
