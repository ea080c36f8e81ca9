"""What the exchanges in chunks promise at any number of ranks."""

import pytest

from hvd_gradcomp import parse
from hvd_gradcomp.exchange import EXCHANGES
from hvd_gradcomp.spec import TensorSpec

RANKS = [2, 3, 4, 7, 8, 16, 64, 100, 256, 1000, 1024]
SIZES = [1_000_000, 1 << 20, 25_000_000]


@pytest.mark.parametrize("numel", SIZES)
def test_two_stage_hardly_grows(numel: int) -> None:
    codec, spec = parse("uniform(bits=8)"), TensorSpec("w", (numel,))
    received = {ranks: EXCHANGES["two_stage"].received(codec, spec, ranks) for ranks in RANKS}
    assert received[1024] <= 2.15 * received[2]
    for ranks, nbytes in received.items():
        assert nbytes <= 0.56 * 4 * (ranks - 1) / ranks * numel, "a 16-bit ring"


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("spec", ["topk(ratio=0.001)", "topk(ratio=0.001) + uniform(bits=8)"])
def test_sparse_split_stays_under_six_words_an_entry(spec: str, numel: int) -> None:
    for ranks in RANKS:
        assert EXCHANGES["sparse_split"].received(parse(spec), TensorSpec("w", (numel,)), ranks) <= 6 * 4 * numel / 1000
