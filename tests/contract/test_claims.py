"""What a codec claims about itself is true."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_gradcomp import parse
from tests.contract import laws, values
from tests.contract.specs import ALL, claiming

CASE_A6 = np.resize(np.array([0.5, -0.25, 0.0], np.float32), 150)
TERNARY = ("uniform(bits=2, symmetric=True, stochastic=True)", "ternary")
"""Codecs whose levels are -1, 0 and 1 times the largest magnitude."""

UNBIASED_QUANTIZERS = [spec for spec in claiming("unbiased") if parse(spec).family == "scalar"]


@pytest.mark.parametrize("claim", ["lossless", "unbiased", "contraction", "summable"])
def test_each_claim_is_made_and_not_made(claim: str) -> None:
    assert 0 < len(claiming(claim)) < len(ALL), f"tests of the claim {claim!r} would show nothing"


@pytest.mark.parametrize("spec", claiming("lossless"))
def test_lossless(spec: str) -> None:
    laws.is_lossless(parse(spec))


@pytest.mark.parametrize("spec", claiming("contraction"))
def test_contraction(spec: str) -> None:
    laws.contracts(parse(spec))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("spec", claiming("summable"))
def test_summable(spec: str, ranks: int) -> None:
    laws.may_be_summed(parse(spec), ranks)


@pytest.mark.parametrize("spec", claiming("unbiased"))
def test_unbiased(spec: str) -> None:
    laws.is_unbiased(parse(spec), values.normal("unbiased", (41,)))
    laws.is_unbiased(parse(spec), values.normal("unbiased", (41,)) ** 5)


@pytest.mark.parametrize("spec", claiming("unbiased"))
def test_unbiased_in_case_a6(spec: str) -> None:
    """20,000 draws of each of the three values."""
    laws.is_unbiased(parse(spec), CASE_A6, count=400)


@pytest.mark.parametrize("spec", TERNARY)
def test_ternary_probabilities_of_case_a6(spec: str) -> None:
    sent = laws.draws(parse(spec), CASE_A6, 400).reshape(-1, 3)
    assert len(sent) == 20_000
    assert np.abs((sent != 0).mean(axis=0) - [1.0, 0.5, 0.0]).max() < 5 * 0.5 / np.sqrt(20_000)
    assert np.abs(sent.mean(axis=0) - [0.5, -0.25, 0.0]).max() < 0.006
    assert set(np.unique(sent)) == {-0.5, 0.0, 0.5}


@pytest.mark.parametrize("spec", UNBIASED_QUANTIZERS)
def test_silent_on_grid(spec: str) -> None:
    one_hot = np.zeros(41, np.float32)
    one_hot[17] = 4.0
    for grid in (one_hot, -one_hot, np.zeros(41, np.float32)):
        laws.is_silent_on_grid(parse(spec), grid)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16])
def test_uniform_is_silent_on_all_its_levels(bits: int) -> None:
    ramp = np.arange(2**bits, dtype=np.float32)
    laws.is_silent_on_grid(parse(f"uniform(bits={bits}, block=None, stochastic=True)"),
                           (ramp / 4 - 5).astype(np.float32), 20)
    if bits > 1:
        laws.is_silent_on_grid(parse(f"uniform(bits={bits}, block=None, symmetric=True, stochastic=True)"),
                               (ramp[:-1] / 4 - ramp[-2] / 8).astype(np.float32), 20)


@pytest.mark.parametrize("spec", UNBIASED_QUANTIZERS)
def test_the_largest_value_keeps_its_sign(spec: str) -> None:
    """Case D5: rounding the top code up would wrap it to the lowest."""
    x = values.normal("largest", (41,))
    x[20], x[21] = 7.0, -7.0
    sent = laws.draws(parse(spec), x, 2000)
    assert (sent[:, 20] >= 0).all() and (sent[:, 21] <= 0).all() and sent[:, 20].any() and sent[:, 21].any()
