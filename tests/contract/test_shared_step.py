"""``sum`` for levels of a step that all ranks share, and steps that are known from earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hvd_gradcomp import parse
from hvd_gradcomp.codecs.lanes import Lanes
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.exchange import EXCHANGES, choose
from hvd_gradcomp.exchange.base import Send
from hvd_gradcomp.exchange.sum import BOUND
from hvd_gradcomp.spec import TensorSpec
from tests.contract import laws, values
from tests.contract.backends import NUMPY, TENSORFLOW_GRAPH, TORCH
from tests.contract.values import Floats, Grads

SHARED = ["uniform(bits=8)", "uniform(bits=2)", "uniform(bits=4, stochastic=True)", "ternary", "qsgd(levels=7)"]
DELAYED = [*SHARED, "fp16"]


class Counted(LocalWorld):
    """Notes how many rounds each tensor took."""

    def __init__(self, spec: str, ranks: int, n: int = 500, **options: object) -> None:
        super().__init__(spec, {"x": (n,)}, ranks, exchange="sum", **options)  # type: ignore[arg-type]
        self.rounds = 0
        self.given, self.received = np.zeros(n), np.zeros(n)

    def _combine(self, sends: list[Send]) -> list[dict[str, Floats]]:
        self.rounds += 1
        return super()._combine(sends)

    def reduce(self, grads: Sequence[Floats]) -> Floats:
        self.rounds = 0
        outs: list[Floats] = [out["x"] for out in self.step([{"x": grad} for grad in grads])]
        self.given += np.mean(np.array(grads, np.float64), axis=0)
        self.received += outs[0]
        return outs[0]

    @property
    def bounds(self) -> list[float]:
        return [float(plan.slots["x"].state[BOUND][0]) for plan in self.plans]

    def missing(self) -> float:
        kept = np.mean([plan.slots["x"].state["residual"].astype(np.float64) for plan in self.plans], axis=0)
        return float(np.abs(self.received + kept - self.given).max())


def normal(step: int, ranks: int, size: float = 1.0, n: int = 500) -> list[Floats]:
    return [np.float32(size) * values.normal(f"shared/{step}/{rank}", (n,)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("spec", DELAYED)
def test_one_round_after_the_first_step(spec: str, ranks: int) -> None:
    world = Counted(spec, ranks)
    rounds = []
    for step in range(4):
        world.reduce(normal(step, ranks))
        rounds.append(world.rounds)
        assert len({np.float32(bound).tobytes() for bound in world.bounds}) == 1
    assert rounds == [2, 1, 1, 1]


@pytest.mark.parametrize("spec", DELAYED)
def test_what_outgrows_the_bound_is_kept_and_caught_up_with(spec: str) -> None:
    world = Counted(spec, 3)
    for step, size in enumerate([1e-3, 1e3, 0.0, 0.0, 0.0, 0.0]):
        assert np.isfinite(world.reduce(normal(step, 3, size))).all()
        assert world.missing() <= (3.0 if spec == "fp16" else 1e-3), "of 1000: halves round when they are added"
        if step == 1:
            assert np.abs(world.received).max() < 100.0, "clipped to the bound of the step before"
            assert world.bounds[0] > 1000.0
    left = np.linalg.norm(world.received - world.given) / np.linalg.norm(world.given)
    assert left <= {"uniform(bits=2)": 0.6, "ternary": 0.6}.get(spec, 0.1)


def test_half_precision_has_room_for_growth() -> None:
    world = Counted("fp16", 2)
    for step, size in enumerate([1.0, 7.0]):
        out = world.reduce(normal(step, 2, size))
        assert np.allclose(out, np.mean(normal(step, 2, size), axis=0), atol=2e-2)


@pytest.mark.parametrize("spec", DELAYED)
def test_residuals_stay_small(spec: str) -> None:
    """One level rounded by chance would let them grow without end."""
    world = Counted(spec, 4)
    norms = []
    for step in range(60):
        world.reduce(normal(step, 4))
        norms.append(np.linalg.norm(world.plans[0].slots["x"].state["residual"]))
    assert max(norms[30:]) <= 1.5 * max(norms[:30])


@pytest.mark.parametrize("spec", SHARED)
def test_without_memory_nothing_is_clipped(spec: str) -> None:
    """Every step then asks for its bound; and what rounds by chance is right in the mean."""
    world = Counted(spec, 2, error_feedback=False)
    total = np.zeros(500)
    for _ in range(100):
        total += world.reduce(normal(0, 2))
        assert world.rounds == 2
    largest = max(np.abs(grad).max() for grad in normal(0, 2))
    levels = parse(spec).summed(2).levels  # type: ignore[union-attr]
    error = np.abs(total / 100 - np.mean(normal(0, 2), axis=0)).max()
    nearest = spec.startswith("uniform") and "stochastic" not in spec
    assert error <= largest / levels * (0.51 if nearest else 5 / np.sqrt(200))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("spec", DELAYED)
def test_a_void_first_step_is_no_first_step(spec: str, bad: float) -> None:
    world = Counted(spec, 2)
    grads = normal(0, 2)
    grads[1][7] = bad
    with np.errstate(all="ignore"):
        world.step([{"x": grad} for grad in grads])
    assert world.bounds == [0.0, 0.0]
    world.reduce(normal(1, 2))
    assert world.rounds == 2 and world.bounds[0] > 0.0


def test_rare_gradients_find_half_of_their_bound() -> None:
    world = Counted("uniform(bits=8)", 2)
    largest = max(np.abs(grad).max() for grad in normal(0, 2))
    for size, bound in ((1.0, 1.0), (0.0, 0.5), (0.0, 0.25)):
        world.reduce(normal(0, 2, size))
        assert world.bounds[0] == pytest.approx(bound * largest)
    clipped = world.reduce(normal(0, 2))
    assert np.abs(clipped).max() == pytest.approx(largest / 4, rel=0.3)
    world.reduce(normal(0, 2, 0.0))
    assert np.abs(world.received - world.given).max() <= 0.02 * largest


@pytest.mark.parametrize(("levels", "ranks", "width", "lanes"), [
    (1, 2, 3, 10), (1, 8, 5, 6), (7, 2, 5, 6), (7, 16, 8, 4), (127, 2, 9, 3), (127, 8, 11, 2), (127, 258, 16, 2),
    (32767, 2, 17, 1), (1, 1, 2, 16), (3, 1, 3, 10)])
def test_lanes(levels: int, ranks: int, width: int, lanes: int) -> None:
    codec = Lanes(levels, False, ranks)
    assert (codec.width, codec.lanes) == (width, lanes)
    laws.may_be_summed(codec, ranks)
    # all at the edge, of both signs, side by side: no lane borrows from its neighbor
    n = 3 * lanes + 1
    x = np.where(np.arange(n) % 3 == 0, -5.0, np.where(np.arange(n) % 3 == 1, 5.0, 0.0)).astype(np.float32)
    ctx = laws.Ctx(NUMPY.ops, TensorSpec("x", (n,)), ranks, 0, 0, {}, np.array([4.0], np.float32))
    words = codec.encode(x, ctx)["words"]
    total = np.zeros_like(words)
    with np.errstate(over="ignore"):
        for _ in range(ranks):
            total += words
    got = codec.decode({"words": total}, np.zeros(n, np.float32), ctx)
    assert np.allclose(got, ranks * np.clip(x, -4, 4), rtol=1e-5)


@pytest.mark.parametrize("backend", [TORCH, TENSORFLOW_GRAPH], ids=str)
@pytest.mark.parametrize("codec", [Lanes(7, False, 3), Lanes(127, True, 5), Lanes(1, True, 2)], ids=str)
def test_the_same_words_everywhere(codec: Lanes, backend: laws.Backend) -> None:
    laws.same_in_every_framework(codec, backend, {**values.odd(41), "normal": values.normal("lanes", (41,))})
    laws.survives_any_bytes(codec, backend)


def test_bytes() -> None:
    spec = TensorSpec("w", (1 << 20,))
    for text, ranks, nbytes in (("uniform(bits=4)", 2, 4 / 6), ("ternary", 2, 0.4), ("uniform(bits=8)", 16, 2.0)):
        (_, bound), (_, words) = EXCHANGES["sum"].sends(parse(text), spec, ranks)
        assert bound == 4 and words == pytest.approx(nbytes * (1 << 20), rel=1e-4)


def test_only_where_it_was_asked_for() -> None:
    assert choose(parse("ternary"), TensorSpec("w", (1000,)), 2).name == "gather"
    for spec in ("uniform(bits=1)", "sign", "topk(ratio=0.1)"):
        with pytest.raises(SpecError, match="cannot be added in flight"):
            choose(parse(spec), TensorSpec("w", (1000,)), 2, "sum")


def test_a_schedule_asks_anew_in_each_stage() -> None:
    world = Counted({0: "none", 2: "fp16", 5: "uniform(bits=4)", 6: "fp16"}, 2)  # type: ignore[arg-type]
    rounds = []
    for step in range(9):
        world.reduce(normal(step, 2))
        rounds.append(world.rounds)
    assert rounds == [1, 1, 2, 1, 1, 2, 2, 1, 1]
    slot = world.plans[0].slots["x"]
    assert slot.codec_text == "0: none, 2: fp16, 5: uniform(bits=4), 6: fp16"
    assert slot.exchange_text == "sum, sum, sum, sum"


def test_a_codec_with_a_bound_is_still_one_codec() -> None:
    slot = LocalWorld("fp16", {"x": (50,)}, 2).plans[0].slots["x"]
    assert (slot.codec_text, slot.exchange_text, len(slot.stages)) == ("fp16", "sum", 2)


@pytest.mark.parametrize("spec", DELAYED)
def test_rare_or_not_nothing_is_lost(spec: str) -> None:
    def rarely(step: int, ranks: int, shapes: laws.Shapes) -> Grads:
        grads = values.gradients(step, ranks, shapes)
        return grads if step % 3 == 1 else [{name: 0 * g for name, g in each.items()} for each in grads]

    laws.conserves(parse(spec), 3, "sum", steps=8, grads=rarely)
    laws.loss_scale_loses_nothing(parse(spec), 3, "sum")
