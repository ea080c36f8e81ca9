"""The quality of ``svd`` and ``powersgd``, and the cases that broke others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray

from hvd_gradcomp import parse, payload
from hvd_gradcomp.codecs import matrix
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.exchange import choose
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.ops.tensorflow import TensorflowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.spec import TensorSpec

Floats = NDArray[np.float32]

ALTERNATING, PLAIN = "powersgd(rank={})", "powersgd(rank={}, alternate=False)"
TWICE = "powersgd(rank={}, iterations=2, alternate=False)"
FORMS = (ALTERNATING, "powersgd(rank={}, iterations=2)", PLAIN, TWICE)
DIAGONAL = np.diag([2.0, 1.0]).astype(np.float32)


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def world(spec: str, shape: tuple[int, ...], ranks: int = 1, **options: Any) -> LocalWorld:
    return LocalWorld(spec, {"w": shape}, ranks, **options)


def reduce(of: LocalWorld, *grads: Floats) -> Floats:
    """One step; the ranks must get the same bits."""
    outs = [out["w"] for out in of.step([{"w": grad} for grad in grads])]
    assert all(out.tobytes() == outs[0].tobytes() for out in outs)
    return outs[0]


def residual(of: LocalWorld) -> Floats:
    """Mean over the ranks."""
    slots = [plan.slots["w"] for plan in of.plans]
    return np.mean([slot.state["residual"] for slot in slots], axis=0).reshape(slots[0].spec.shape)


def best_error(x: Floats, rank: int) -> float:
    """Of any matrix of this rank (Eckart and Young)."""
    return float(np.sqrt((np.linalg.svd(x.astype(np.float64))[1][rank:] ** 2).sum()))


# -- arguments, bytes, views ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [
    "svd(rank=0)", "svd(rank=1.5)", "svd(rank=True)", "powersgd(rank=0)", "powersgd(rank=-1)", "powersgd(rank='4')",
    "powersgd(iterations=0)", "powersgd(iterations=3)", "powersgd(iterations=True)", "powersgd(alternate=1)"])
def test_impossible_arguments_are_errors(spec: str) -> None:
    with pytest.raises(SpecError, match="must be"):
        parse(spec)


def test_alternating_form_reaches_its_target() -> None:
    codec, spec = parse("powersgd(rank=4)"), TensorSpec("w", (4096, 4096))
    sends = choose(codec, spec, 2).sends(codec, spec, 2)
    assert sends == [("sum", 4096 * 4 * 4)], "one all-reduce of one factor"
    assert 4 * spec.numel / sends[0][1] >= 500


@pytest.mark.parametrize(("spec", "rounds"), [("powersgd(rank=4, iterations=2)", 2), (PLAIN.format(4), 2),
                                              (TWICE.format(4), 4)])
def test_other_forms_send_both_factors(spec: str, rounds: int) -> None:
    codec, tensor = parse(spec), TensorSpec("w", (100, 70))
    sends = choose(codec, tensor, 2).sends(codec, tensor, 2)
    assert sends == [("sum", 4 * 4 * 100), ("sum", 4 * 4 * 70)] * (rounds // 2)


def test_svd_bytes() -> None:
    assert payload.nbytes(parse("svd(rank=3)").layout(TensorSpec("w", (100, 70)))) == 4 * 3 * (100 + 70 + 1)


@pytest.mark.parametrize(("shape", "expected"), [
    ((64, 48), (64, 48)), ((32, 16, 3, 3), (32, 144)), ((100,), (10, 10)), ((1, 50), (8, 7)), ((50, 1, 1), (8, 7)),
    ((7,), (3, 3)), ((1,), (1, 1)), ((), (1, 1)), ((2, 1, 5), (2, 5))])
def test_view(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert matrix.view(shape) == expected


@pytest.mark.parametrize("spec", ["svd(rank=8)", *(form.format(8) for form in FORMS)])
def test_rank_of_the_shorter_side_is_exact(spec: str) -> None:
    """Case D1: (4, 2048) with rank 8."""
    grads = [normal(seed, 4, 2048) for seed in (1, 2)]
    out = reduce(world(spec, (4, 2048), 2), *grads)
    assert np.abs(out - np.mean(grads, axis=0)).max() <= 1e-5


# -- svd -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (16, 4, 3, 3)])
@pytest.mark.parametrize("rank", [1, 4])
def test_svd_is_the_truncated_decomposition(shape: tuple[int, ...], rank: int) -> None:
    x = normal(3, *shape)
    u, s, vt = np.linalg.svd(x.reshape(shape[0], -1).astype(np.float64), full_matrices=False)
    right = (u[:, :rank] * s[:rank]) @ vt[:rank]
    out = reduce(world(f"svd(rank={rank})", shape), x)
    assert np.abs(out.reshape(right.shape) - right).max() <= 1e-5 * np.abs(right).max()


def test_svd_gives_up_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception on one rank would leave the others hanging: the step sends nothing and loses nothing."""
    def fails(*_: Any, **__: Any) -> None:
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", fails)
    x, of = normal(4, 20, 10), world("svd(rank=2)", (20, 10))
    assert not reduce(of, x).any()
    assert np.array_equal(residual(of), x)


# -- powersgd: what it converges to --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(40, 30), (30, 40)])
@pytest.mark.parametrize("rank", [1, 3])
def test_converges_to_the_best_approximation(form: str, shape: tuple[int, int], rank: int) -> None:
    x = normal(5, *shape)
    of = world(form.format(rank), shape, error_feedback=False)
    errors = [float(np.linalg.norm(reduce(of, x) - x)) for _ in range(200)]
    best = best_error(x, rank)
    assert errors[0] > 1.01 * best, "the first step cannot know"
    assert best * (1 - 1e-5) <= errors[-1] <= best * (1 + 1e-3)
    assert all(late <= early * (1 + 1e-5) for early, late in pairwise(errors)), \
        "without a warm start the error jumps about"


@pytest.mark.parametrize(("form", "expected"), [
    (PLAIN, [1.2649, 1.0228, 1.0015, 1.0001]),  # the numbers of case G4
    (ALTERNATING, [1.5811, 1.2649, 1.0847, 1.0228]),  # a half of such a step at a time
    (TWICE, [1.0228, 1.0001]),  # two at a time
])
def test_warm_start_in_numbers(form: str, expected: list[float]) -> None:
    """Case G4: diag(2, 1), beside zeros because 2 x 2 travels dense in the plain forms, from Q = [1, 1]."""
    x = np.zeros((4, 4), np.float32)
    x[:2, :2] = DIAGONAL
    of = world(form.format(1), (4, 4), error_feedback=False)
    of.plans[0].slots["w"].state["factor"][:] = [1.0, 1.0, 0.0, 0.0]
    errors = [float(np.linalg.norm(reduce(of, x) - x)) for _ in expected]
    assert errors == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize("form", FORMS)
def test_zeros_do_not_kill_the_warm_start(form: str) -> None:
    """Case C1 (e), and zeros in the middle."""
    x = np.zeros((4, 4), np.float32)
    x[:2, :2] = DIAGONAL
    for before in (0, 1, 4, 5):
        of = world(form.format(1), (4, 4), 2, error_feedback=False)
        for _ in range(before):
            reduce(of, x, x)
        for _ in range(2):
            assert not reduce(of, 0 * x, 0 * x).any()
        errors = [float(np.linalg.norm(reduce(of, x, x) - x)) for _ in range(30)]
        assert errors[0] < 2.236 and errors[-1] == pytest.approx(1.0, abs=1e-4)


def test_zeros_leave_no_residual() -> None:
    of = world("powersgd(rank=1)", (2, 2), 2)
    zeros = np.zeros((2, 2), np.float32)
    assert not reduce(of, zeros, zeros).any() and not residual(of).any()
    assert np.linalg.norm(reduce(of, DIAGONAL, DIAGONAL) - DIAGONAL) < 2.236


@pytest.mark.parametrize("form", FORMS)
def test_rank_above_that_of_the_matrix(form: str) -> None:
    """Case C1 (f): the second column has nothing to hold."""
    x = np.outer(normal(6, 12), normal(7, 9)).astype(np.float32)
    of = world(form.format(2), x.shape, error_feedback=False)
    outs = [reduce(of, x) for _ in range(6)]
    assert np.isfinite(outs).all()
    assert np.abs(np.array(outs[1:]) - x).max() <= 1e-5 * np.abs(x).max()


@pytest.mark.parametrize("form", FORMS)
def test_what_the_warm_start_cannot_see_is_found(form: str) -> None:
    """A gradient orthogonal to the last one multiplies to 0; new directions are drawn."""
    one, other = np.zeros((2, 8, 8), np.float32)
    one[0, 0], other[5, 5] = 3.0, 2.0
    of = world(form.format(1), (8, 8), error_feedback=False)
    for _ in range(6):
        reduce(of, one)
    outs = [reduce(of, other) for _ in range(6)]
    assert np.abs(outs[-1] - other).max() <= 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_independent_of_the_number_of_ranks(form: str) -> None:
    """Case A4: one matrix on every rank, then a fixed batch split over them."""
    x = np.outer(normal(8, 12), normal(9, 9)).astype(np.float32)
    for ranks in (1, 2, 4):
        of = world(form.format(1), x.shape, ranks, error_feedback=False)
        outs = [reduce(of, *[x] * ranks) for _ in range(3)]
        assert np.abs(np.array(outs[1:]) - x).max() <= 1e-5 * np.abs(x).max()
    batch = [normal(seed, 20, 16) for seed in range(4)]
    split = {ranks: [np.mean(batch[i :: ranks], axis=0) for i in range(ranks)] for ranks in (1, 2, 4)}
    worlds = {ranks: world(form.format(2), (20, 16), ranks) for ranks in split}
    for _ in range(4):
        outs = [reduce(worlds[ranks], *split[ranks]) for ranks in split]
        assert max(np.abs(out - outs[0]).max() for out in outs) <= 2e-5


# -- conservation, void steps, frameworks --------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["sum", "gather"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_lost(form: str, ranks: int, exchange: str) -> None:
    """Whatever the exchange, and shapes with padding too; the residual is that of the local product."""
    for shape in ((24, 20), (20, 24), (8, 3, 3, 3), (45,)):
        of = world(form.format(2), shape, ranks, exchange=exchange)
        given, received = np.zeros(shape), np.zeros(shape)
        for step in range(5):
            grads = [normal(100 * step + rank, *shape) for rank in range(ranks)]
            received += reduce(of, *grads)
            given += np.mean(grads, axis=0)
            assert np.abs(received + residual(of) - given).max() <= 2e-5
        assert np.abs(residual(of)).max() > 0.1, "compression that keeps nothing back is none"


@pytest.mark.parametrize(("spec", "exchange"), [
    ("powersgd(rank=2) + fp16", "sum"), (f"{PLAIN.format(2)} + fp16", "sum"),
    ("powersgd(rank=2) + uniform(bits=8)", "gather"), (f"{PLAIN.format(2)} + uniform(bits=8)", "gather")])
def test_chains(spec: str, exchange: str) -> None:
    """Factors in 16 or 8 bits: half or a quarter of the bytes, one error feedback around both, and on average the
    gradient arrives."""
    codec, plain, tensor = parse(spec), parse(spec.split(" + ")[0]), TensorSpec("w", (96, 64))
    assert choose(codec, tensor, 2).name == exchange
    sizes = [sum(payload.nbytes(layout) for layout in each.round_layouts(tensor)) for each in (codec, plain)]
    assert sizes[0] <= 0.55 * sizes[1]
    of = world(spec, tensor.shape, 3)
    grads = [normal(seed, *tensor.shape) for seed in range(3)]
    steps = 20
    received = np.sum([reduce(of, *grads) for _ in range(steps)], axis=0, dtype=np.float64)
    given = steps * np.mean(grads, axis=0)
    assert np.abs(received + residual(of) - given).max() <= 1e-3 * np.abs(given).max()
    assert np.linalg.norm(residual(of)) < np.linalg.norm(given), "the residual does not grow with the steps"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("spec", ["svd(rank=2)", "tt(rank=2)", "tr(rank=2)", *(form.format(2) for form in FORMS)])
def test_not_a_number_on_one_rank(spec: str, bad: float) -> None:
    """Case B4: no exception, every rank sees it, and the next steps are as if it had not been."""
    disturbed, calm = (world(spec, (12, 10), 2) for _ in range(2))
    for step in range(4):
        grads = [normal(10 * step + rank, 12, 10) for rank in range(2)]
        poisoned = grads[0].copy()
        poisoned[3, 3] = bad
        assert not np.isfinite(reduce(disturbed, poisoned, grads[1])).any()
        assert reduce(disturbed, *grads).tobytes() == reduce(calm, *grads).tobytes()


@pytest.mark.parametrize("spec", ["svd(rank=2)", *(form.format(2) for form in FORMS)])
def test_torch_gives_what_numpy_gives(spec: str) -> None:
    reference, of = world(spec, (24, 20), 3), world(spec, (24, 20), 3, ops=TorchOps())
    for step in range(4):
        grads = [normal(10 * step + rank, 24, 20) for rank in range(3)]
        outs = [out["w"] for out in of.step([{"w": torch.from_numpy(grad)} for grad in grads])]
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert np.abs(outs[0].numpy() - reduce(reference, *grads)).max() <= 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_rounding_errors_are_no_directions(form: str) -> None:
    """Of a matrix of rank 1 the other columns hold rounding errors, which differ by library. What comes out of a next
    gradient of full rank must not."""
    one = np.outer(normal(16, 40), normal(17, 30)).astype(np.float32)
    reference, of = world(form.format(3), one.shape), world(form.format(3), one.shape, ops=TorchOps())
    for step, x in enumerate([one, one, one, normal(18, 40, 30), normal(19, 40, 30)]):
        out = of.step([{"w": torch.from_numpy(x)}])[0]["w"].numpy()
        assert np.abs(out - reduce(reference, x)).max() <= 1e-3, f"step {step}"


@pytest.mark.parametrize("spec", [ALTERNATING.format(2), PLAIN.format(2)])
def test_tensorflow_traces_once_and_gives_what_numpy_gives(spec: str) -> None:
    """Even and odd steps in one trace, the warm start in a variable."""
    reference, of = world(spec, (24, 20), 2), world(spec, (24, 20), 2, ops=TensorflowOps(), state=tf.Variable)
    traces = []

    @tf.function
    def step(grads: list[dict[str, Any]]) -> list[dict[str, Any]]:
        traces.append(1)
        return of.step(grads)

    for number in range(4):
        grads = [normal(10 * number + rank, 24, 20) for rank in range(2)]
        outs = [out["w"].numpy() for out in step([{"w": tf.constant(grad)} for grad in grads])]
        assert outs[0].tobytes() == outs[1].tobytes()
        assert np.abs(outs[0] - reduce(reference, *grads)).max() <= 1e-4
    assert len(traces) == 1


@pytest.mark.parametrize("spec", ["svd(rank=2)", "tt(rank=2)", ALTERNATING.format(2), PLAIN.format(2)])
def test_autocast_changes_no_bit(spec: str) -> None:
    """Case D1."""
    def run(autocast: bool) -> list[torch.Tensor]:
        of = world(spec, (24, 20), 2, ops=TorchOps())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return [of.step([{"w": torch.from_numpy(normal(step + rank, 24, 20))} for rank in range(2)])[0]["w"]
                    for step in range(3)]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


# -- orthonormal rows ----------------------------------------------------------------------------------------


def _rows() -> dict[str, Floats]:
    some = normal(11, 4, 50)
    dependent = some.copy()
    dependent[2] = dependent[0] - 2 * dependent[1]
    spread = some * np.float32([[1e-3], [1e3], [1.0], [1e2]])
    hidden = some.copy()
    hidden[3] = hidden[0] + 1e-4 * hidden[3]
    return {"normal": some, "zeros": 0 * some, "one zero row": some * np.float32([[1], [0], [1], [1]]),
            "dependent": dependent, "spread": spread, "nearly dependent": hidden, "large": 1e37 * some,
            "small": np.float32(1e-25) * some, "all equal": np.ones((4, 50), np.float32),
            "not a number": np.where(some > 1.5, np.float32(np.nan), some)}


@pytest.mark.parametrize("name", _rows())
def test_orthonormal(name: str) -> None:
    rows, spare = _rows()[name], normal(12, 4, 50)
    results = [matrix.orthonormal(NumpyOps(), rows, spare),
               matrix.orthonormal(TorchOps(), torch.from_numpy(rows), torch.from_numpy(spare)).numpy(),
               matrix.orthonormal(TensorflowOps(), tf.constant(rows), tf.constant(spare)).numpy()]
    q = results[0].astype(np.float64)
    assert np.abs(q @ q.T - np.eye(4)).max() <= 1e-6
    assert all(other.tobytes() == results[0].tobytes() for other in results[1:]), "not the same bits everywhere"
    if name in ("normal", "spread", "nearly dependent"):
        left = rows - (rows @ q.T) @ q
        assert np.abs(left).max() <= 1e-5 * np.abs(rows).max(), "the rows are not in the span of the result"


def test_a_basis_of_the_whole_space() -> None:
    rows = np.zeros((3, 3), np.float32)
    rows[0, 0] = 1.0
    q = matrix.orthonormal(NumpyOps(), rows, normal(13, 3, 3)).astype(np.float64)
    assert np.abs(q @ q.T - np.eye(3)).max() <= 1e-6


def test_new_directions_are_shared_by_all_ranks_and_differ_by_step() -> None:
    codec, spec = parse("powersgd(rank=2)"), TensorSpec("w", (16, 12))

    def payload_of(rank: int, step: int) -> Floats:
        state = {"factor": np.zeros(32, np.float32), "step": np.array([step], np.int32)}
        return codec.encode(normal(14, 192), Ctx(NumpyOps(), spec, 2, rank, 0, state))["factor"]

    assert np.array_equal(payload_of(0, 0), payload_of(1, 0))
    assert not np.array_equal(payload_of(0, 0), payload_of(0, 2))


def test_square_root_is_rounded_alike() -> None:
    x = np.abs(normal(15, 5000))
    assert TorchOps().sqrt(torch.from_numpy(x)).numpy().tobytes() == np.sqrt(x).tobytes()
    assert TensorflowOps().sqrt(tf.constant(x)).numpy().tobytes() == np.sqrt(x).tobytes()


def test_cond_computes_one_branch() -> None:
    def never() -> None:
        raise AssertionError("the other branch was computed")

    for ops, array in ((NumpyOps(), np.array), (TorchOps(), torch.tensor), (TensorflowOps(), tf.constant)):
        assert float(ops.cond(array([True]), lambda array=array: array([1.0]), never)[0]) == 1.0
        assert float(ops.cond(array([False]), never, lambda array=array: array([2.0]))[0]) == 2.0
