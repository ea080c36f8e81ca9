"""Every registered codec is held to every law, in worlds of 1, 2, 3, 5 and 8 ranks in lockstep."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_gradcomp import parse
from tests.contract import laws, values
from tests.contract.backends import BACKENDS, TENSORFLOW, TENSORFLOW_GRAPH, TORCH, TORCH_DEVICE, Backend
from tests.contract.specs import ALL, CARRIED, CHUNKED, COMPRESSING, ENDS, LAST

RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 5])
MANY_RANKS = pytest.mark.parametrize("ranks", [7, 8])
"""More than some tensors have elements, and no divisor of their length."""
FEWER_RANKS = pytest.mark.parametrize("ranks", [1, 3])
"""For what does not depend on how the ranks' sums round."""
ODD = {n: {**values.odd(n), **values.wild(n, 4), "normal": values.normal("frameworks", (n,))} for n in (1, 41, 1025)}


@RANKS
@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_conserves(spec: str, exchange: str, ranks: int) -> None:
    laws.conserves(parse(spec), ranks, exchange)


@FEWER_RANKS
@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_conserves_odd_shapes(spec: str, exchange: str, ranks: int) -> None:
    shapes = {str(shape): shape for shape in values.ODD_SHAPES}
    laws.conserves(parse(spec), ranks, exchange, shapes=shapes, steps=2)


@MANY_RANKS
@pytest.mark.parametrize(("spec", "exchange"), CHUNKED)
def test_holds_in_chunks(spec: str, exchange: str, ranks: int) -> None:
    shapes = {str(shape): shape for shape in values.ODD_SHAPES}
    laws.conserves(parse(spec), ranks, exchange, shapes=shapes, steps=2)
    laws.ranks_agree(parse(spec), ranks, exchange, steps=2)


@pytest.mark.parametrize(("spec", "exchange"), CHUNKED)
def test_loss_scale_loses_nothing_in_chunks(spec: str, exchange: str) -> None:
    laws.loss_scale_loses_nothing(parse(spec), 3, exchange)


@RANKS
@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_ranks_agree(spec: str, exchange: str, ranks: int) -> None:
    laws.ranks_agree(parse(spec), ranks, exchange)


@RANKS
@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_counts_every_byte(spec: str, exchange: str, ranks: int) -> None:
    laws.counts_every_byte(parse(spec), ranks, exchange)


@FEWER_RANKS
@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_zeros_stay_zero(spec: str, exchange: str, ranks: int) -> None:
    laws.zeros_stay_zero(parse(spec), ranks, exchange)


@FEWER_RANKS
@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_finite_stays_finite(spec: str, exchange: str, ranks: int) -> None:
    laws.finite_stays_finite(parse(spec), ranks, exchange)


@pytest.mark.parametrize(("ranks", "bad"), [(1, np.nan), (2, np.inf), (3, np.nan), (5, np.inf)])
@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_void_step_leaves_no_trace(spec: str, exchange: str, ranks: int, bad: float) -> None:
    laws.void_step_leaves_no_trace(parse(spec), ranks, bad, exchange)


@FEWER_RANKS
@pytest.mark.parametrize("spec", COMPRESSING)
def test_loss_scale_loses_nothing(spec: str, ranks: int) -> None:
    laws.loss_scale_loses_nothing(parse(spec), ranks)


@pytest.mark.parametrize("spec", ALL)
def test_layout_is_fixed(spec: str) -> None:
    laws.layout_is_fixed(parse(spec))


@pytest.mark.parametrize("backend", BACKENDS[:-1], ids=str)
@pytest.mark.parametrize("spec", ALL)
def test_encode_only_reads(spec: str, backend: Backend) -> None:
    laws.encode_only_reads(parse(spec), backend)


@pytest.mark.parametrize("spec", ALL)
def test_round_trips(spec: str) -> None:
    laws.round_trips(parse(spec))


@pytest.mark.parametrize(("spec", "exchange"), [*((spec, "auto") for spec in ALL), *CHUNKED])
def test_never_waits(spec: str, exchange: str) -> None:
    laws.never_waits(parse(spec), exchange)


@pytest.mark.parametrize("n", ODD)
@pytest.mark.parametrize("backend", [TORCH, TORCH_DEVICE], ids=str)
@pytest.mark.parametrize("spec", ALL)
def test_same_in_torch(spec: str, backend: Backend, n: int) -> None:
    laws.same_in_every_framework(parse(spec), backend, ODD[n])


@pytest.mark.parametrize("spec", ENDS)
def test_same_in_eager_tensorflow(spec: str) -> None:
    laws.same_in_every_framework(parse(spec), TENSORFLOW, ODD[1025])


@pytest.mark.parametrize("spec", ALL)
def test_same_in_a_traced_graph(spec: str) -> None:
    laws.same_in_every_framework(parse(spec), TENSORFLOW_GRAPH, ODD[41])


@pytest.mark.parametrize("backend", [TORCH, TORCH_DEVICE], ids=str)
@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_same_history_in_torch(spec: str, exchange: str, backend: Backend) -> None:
    laws.same_history_in(parse(spec), backend, 3, exchange)


@pytest.mark.parametrize("spec", LAST)
def test_same_history_in_one_trace(spec: str) -> None:
    laws.same_history_in(parse(spec), TENSORFLOW_GRAPH, 3)


@pytest.mark.parametrize(("spec", "exchange"), [
    ("uniform(bits=3, block=7)", "two_stage"), ("topk(ratio=0.1) + uniform(bits=8)", "sparse_split")])
def test_same_history_in_one_trace_in_chunks(spec: str, exchange: str) -> None:
    laws.same_history_in(parse(spec), TENSORFLOW_GRAPH, 3, exchange)


@pytest.mark.parametrize("spec", LAST[:4])
def test_same_history_in_eager_tensorflow(spec: str) -> None:
    """Few of them: summed and gathered, with and without a step count. Their arithmetic is tested above."""
    laws.same_history_in(parse(spec), TENSORFLOW, 3)
