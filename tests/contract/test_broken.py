"""Every law rejects what breaks it: a suite that cannot fail would show nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_gradcomp import native
from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.codecs.cast import Bf16
from hvd_gradcomp.codecs.registry import CODECS
from hvd_gradcomp.codecs.topk import TopK
from hvd_gradcomp.codecs.uniform import Uniform
from hvd_gradcomp.exchange import EXCHANGES
from hvd_gradcomp.memory.error_feedback import ErrorFeedback
from tests.contract import broken, laws, values
from tests.contract.backends import NUMPY, TENSORFLOW_GRAPH, TORCH

STOCHASTIC: dict[str, Any] = {"bits": 4, "stochastic": True}


@pytest.fixture(autouse=True)
def broken_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, exchange in broken.EXCHANGES.items():
        monkeypatch.setitem(EXCHANGES, name, exchange)


@pytest.mark.parametrize(("codec", "exchange"), [
    (broken.ClaimsLossless(), "gather"), (broken.Overwrites(ratio=0.5, index="plain"), "gather"),
    (broken.SumsOwnScales(), "sum"),
    (TopK(ratio=0.1), "loses_residual"), (Uniform(), "wrong_mean")], ids=str)
def test_conserves(codec: Codec, exchange: str) -> None:
    with pytest.raises(AssertionError, match="received is not the mean of sent"):
        laws.conserves(codec, 2, exchange)


@pytest.fixture
def pure(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels, which would do the memory's work in its place."""
    monkeypatch.setattr(native, "find", lambda codec, spec: None)


@pytest.mark.usefixtures("pure")
def test_conserves_rejects_the_wrong_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ErrorFeedback, "settle", broken.settle_against_gradient)
    with pytest.raises(AssertionError, match="step 1"):
        laws.conserves(TopK(ratio=0.1), 2)


@pytest.mark.usefixtures("pure")
def test_loss_scale_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ErrorFeedback, "load", broken.load_unscaled)
    laws.conserves(TopK(ratio=0.1), 2)
    with pytest.raises(AssertionError, match="received is not the mean of sent"):
        laws.loss_scale_loses_nothing(TopK(ratio=0.1), 2)


@pytest.mark.parametrize(("codec", "exchange"), [(broken.DecodesByRank(), "sum"), (Uniform(), "own_first")], ids=str)
def test_ranks_agree(codec: Codec, exchange: str) -> None:
    with pytest.raises(AssertionError, match="got another"):
        laws.ranks_agree(codec, 3, exchange)


def test_counts_every_byte() -> None:
    with pytest.raises(AssertionError, match="moved"):
        laws.counts_every_byte(Uniform(), 3, "miscounts_bytes")


def test_void_step_leaves_no_trace() -> None:
    with pytest.raises(AssertionError, match="moved state"):
        laws.void_step_leaves_no_trace(broken.MovesStateWhenEncoding(), 2, np.nan)
    with pytest.raises(AssertionError, match="is finite on rank"):
        laws.void_step_leaves_no_trace(Bf16(), 2, np.nan, ops=broken.HidesVoidSteps())
    with pytest.raises(AssertionError, match="moved state"):
        laws.void_step_leaves_no_trace(Bf16(), 2, np.inf, ops=broken.CommitsVoidSteps())


@pytest.mark.parametrize("codec", [
    broken.LengthFollowsValues(), broken.LengthFollowsRank(), broken.LayoutFollowsName()], ids=type)
def test_layout_is_fixed(codec: Codec) -> None:
    with pytest.raises(AssertionError, match="layout"):
        laws.layout_is_fixed(codec)


def test_encode_only_reads() -> None:
    with pytest.raises(AssertionError, match="changed the state"):
        laws.encode_only_reads(broken.MovesStateWhenEncoding(), NUMPY)
    for backend in (NUMPY, TORCH):
        with pytest.raises(AssertionError, match="changed its input"):
            laws.encode_only_reads(broken.ChangesItsInput(), backend)


def test_is_lossless() -> None:
    with pytest.raises(AssertionError, match="arrived changed"):
        laws.is_lossless(broken.ClaimsLossless())


def test_is_unbiased() -> None:
    with pytest.raises(AssertionError, match="mean off by"):
        laws.is_unbiased(broken.Biased(**STOCHASTIC), values.normal("broken", (41,)))
    with pytest.raises(AssertionError, match="mean off by"):
        laws.is_unbiased(Uniform(bits=4), values.normal("broken", (41,)))


def test_is_silent_on_grid() -> None:
    grid = np.resize(np.array([0.0, 4.0], np.float32), 41)
    laws.is_unbiased(broken.Noisy(**STOCHASTIC), grid)
    with pytest.raises(AssertionError, match="moved from"):
        laws.is_silent_on_grid(broken.Noisy(**STOCHASTIC), grid)


@pytest.mark.parametrize("codec", [broken.WrongScale(), Uniform(bits=1, block=None)], ids=str)
def test_contracts(codec: Codec) -> None:
    """The second is not broken: it does not claim it."""
    assert codec.claims.contraction == isinstance(codec, broken.WrongScale)
    with pytest.raises(AssertionError, match="not below"):
        laws.contracts(codec)


def test_may_be_summed() -> None:
    with pytest.raises(AssertionError, match="decoded sum is off"):
        laws.may_be_summed(broken.SumsOwnScales(), 2)


def test_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "uniform", broken.ForgetsItsArguments)
    with pytest.raises(AssertionError, match="gives uniform"):
        laws.round_trips(broken.ForgetsItsArguments(bits=3))
    monkeypatch.setitem(CODECS, "uniform", broken.PrintsAnother)
    with pytest.raises(AssertionError, match="parses to"):
        laws.round_trips(broken.PrintsAnother(bits=3, block=7))


def test_same_in_every_framework() -> None:
    codec, inputs = broken.DependsOnFramework(), {"normal": values.normal("broken", (41,))}
    laws.same_in_every_framework(codec, NUMPY, inputs)
    for backend in (TORCH, TENSORFLOW_GRAPH):
        with pytest.raises(AssertionError, match="encodes byte"):
            laws.same_in_every_framework(codec, backend, inputs)


def test_same_history_in() -> None:
    with pytest.raises(AssertionError, match="gives element"):
        laws.same_history_in(broken.DependsOnFramework(), TORCH, 2)


def test_never_waits() -> None:
    with pytest.raises(AssertionError, match="looked at values"):
        laws.never_waits(broken.LooksAtValues())


def test_zeros_stay_zero() -> None:
    with pytest.raises(AssertionError, match="out of zeros"):
        laws.zeros_stay_zero(broken.SomethingOutOfNothing(), 2)


def test_finite_stays_finite() -> None:
    with pytest.raises(AssertionError, match="is not finite"):
        laws.finite_stays_finite(broken.Overflows(), 2)


def test_refuses_outside_indices() -> None:
    with pytest.raises(AssertionError, match="was accepted"):
        laws.refuses_outside_indices(broken.TrustsIndices(index="plain"), NUMPY)


def test_survives_any_bytes() -> None:
    with pytest.raises(AssertionError, match="ended in IndexError"):
        laws.survives_any_bytes(broken.CrashesOnIndices(index="plain"), NUMPY)
