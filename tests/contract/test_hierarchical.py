"""Dense inside a host, compressed between hosts: the laws of all exchanges, on declared hosts."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_gradcomp import parse
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.exchange import EXCHANGES, choose, with_hosts
from hvd_gradcomp.exchange.hierarchical import Hierarchical
from hvd_gradcomp.spec import TensorSpec
from tests.contract import laws, values
from tests.contract.backends import TENSORFLOW, TORCH, TORCH_DEVICE
from tests.contract.specs import LAST

HOSTS = pytest.mark.parametrize(("ranks", "local"), [(4, 2), (6, 2), (6, 3), (8, 4)])
SPECS = [spec for spec in LAST if Hierarchical(2, EXCHANGES["gather"]).allows(parse(spec)) is None]
SCALING = [("uniform(bits=4)", "two_stage"), ("topk(ratio=0.05)", "sparse_split"), ("sign(block=32)", "two_stage")]
LARGE = {"w": (700, 700)}
"""Enough that ``auto`` does not gather between many hosts."""


def test_codecs_of_every_family_but_those_that_learn() -> None:
    assert {parse(spec).family for spec in SPECS} >= {"cast", "scalar", "sparse", "combined"}


@HOSTS
@pytest.mark.parametrize("spec", SPECS)
def test_conserves(spec: str, ranks: int, local: int) -> None:
    laws.conserves(parse(spec), ranks, f"hierarchical(local={local})")


@pytest.mark.parametrize(("ranks", "local"), [(4, 2), (10, 5)])
@pytest.mark.parametrize("spec", SPECS)
def test_conserves_odd_shapes(spec: str, ranks: int, local: int) -> None:
    """Among them tensors with fewer elements than a host has ranks."""
    shapes = {str(shape): shape for shape in values.ODD_SHAPES}
    laws.conserves(parse(spec), ranks, f"hierarchical(local={local})", shapes=shapes, steps=2)
    laws.zeros_stay_zero(parse(spec), ranks, f"hierarchical(local={local})")


@HOSTS
@pytest.mark.parametrize("spec", SPECS)
def test_ranks_agree_and_bytes_are_counted(spec: str, ranks: int, local: int) -> None:
    laws.ranks_agree(parse(spec), ranks, f"hierarchical(local={local})")
    laws.counts_every_byte(parse(spec), ranks, f"hierarchical(local={local})")


@pytest.mark.parametrize(("spec", "between"), SCALING)
def test_any_exchange_between_hosts(spec: str, between: str) -> None:
    ranks, exchange = 16, "hierarchical(local=2)"
    chosen = choose(parse(spec), TensorSpec("w", LARGE["w"]), ranks, exchange)
    assert isinstance(chosen, Hierarchical) and chosen.between.name == between
    laws.conserves(parse(spec), ranks, exchange, shapes=LARGE, steps=2)
    laws.ranks_agree(parse(spec), ranks, exchange, shapes=LARGE, steps=2)


@pytest.mark.parametrize("spec", SPECS)
def test_void_step_and_loss_scale(spec: str) -> None:
    laws.void_step_leaves_no_trace(parse(spec), 4, np.nan, "hierarchical(local=2)")
    laws.loss_scale_loses_nothing(parse(spec), 4, "hierarchical(local=2)")


@pytest.mark.parametrize("spec", ["uniform(bits=4)", "topk(ratio=0.1) + uniform(bits=8)", "fp16"])
def test_same_history_in_other_frameworks(spec: str) -> None:
    # Not in one trace: with all ranks in one graph, TensorFlow adds their float32 values in another order.
    for backend in (TORCH, TORCH_DEVICE, TENSORFLOW):
        laws.same_history_in(parse(spec), backend, 4, "hierarchical(local=2)")
    laws.never_waits(parse(spec), "hierarchical(local=2)")


def test_a_host_is_exact_within_itself() -> None:
    """Hosts whose ranks differ, but whose means are equal, lose what one rank alone would."""
    half = [{"x": np.array([1.0, -3.0, 2.0, 5.0], np.float32)}, {"x": np.array([3.0, 3.0, -2.0, 3.0], np.float32)}]
    world = LocalWorld("topk(ratio=0.5)", {"x": (4,)}, 4, exchange="hierarchical(local=2)")
    outs = world.step([*half, *half])
    # The means are 2, 0 | 0, 4: each share of two elements sends its larger one, which is all there is.
    assert all(out["x"].tolist() == [2.0, 0.0, 0.0, 4.0] for out in outs)
    assert not any(plan.slots["x"].state["residual"].any() for plan in world.plans)


def test_a_residual_is_where_the_share_is() -> None:
    world = LocalWorld("topk(ratio=0.1)", {"x": (40,)}, 6, exchange="hierarchical(local=3)")
    world.step(values.gradients(0, 6, {"x": (40,)}))
    for rank, plan in enumerate(world.plans):
        kept, begin = plan.slots["x"].state["residual"], 14 * (rank % 3)
        assert kept[begin : begin + 14].any()
        assert not kept[:begin].any() and not kept[begin + 14 :].any()


def test_a_payload_leaves_a_host_once() -> None:
    codec, spec, ranks = parse("uniform(bits=8)"), TensorSpec("w", (1 << 20,)), 8
    chosen = choose(codec, spec, ranks, "hierarchical(local=4)")
    assert isinstance(chosen, Hierarchical)
    all_ranks_of_a_host = 4 * chosen.crossing(codec, spec, ranks)
    assert all_ranks_of_a_host == pytest.approx(choose(codec, spec, 2).received(codec, spec, 2), rel=1e-3)


@pytest.mark.parametrize(("ranks", "exchange", "message"), [
    (5, "hierarchical(local=2)", "5 ranks are no hosts of 2 each"),
    (4, "hierarchical", "say how many ranks a host has"), (4, "hierarchical(local=x)", "there is no exchange")])
def test_hosts_that_cannot_be(ranks: int, exchange: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        LocalWorld("sign", {"x": (40,)}, ranks, exchange=exchange)


def test_what_learns_and_momentum_are_refused() -> None:
    with pytest.raises(SpecError, match="learns from step to step"):
        LocalWorld("powersgd(rank=2)", {"x": (40, 30)}, 4, exchange="hierarchical(local=2)")
    with pytest.raises(SpecError, match="momentum correction"):
        LocalWorld("topk(ratio=0.1)", {"x": (40, 30)}, 4, exchange="hierarchical(local=2)", dgc=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_host_is_auto(ranks: int) -> None:
    codec, spec = parse("sign"), TensorSpec("w", (1000,))
    assert choose(codec, spec, ranks, "hierarchical(local=2)") == choose(codec, spec, ranks)
    assert choose(codec, spec, 4, "hierarchical(local=1)") == choose(codec, spec, 4)
    assert with_hosts({"a": "hierarchical", "*": "gather"}, lambda: 4) == {"a": "hierarchical(local=4)", "*": "gather"}
