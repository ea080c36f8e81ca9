"""The plan, who is told of differences in it, and the policy for small tensors."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hvd_gradcomp.agreement import check
from hvd_gradcomp.errors import DisagreementError, SpecError
from hvd_gradcomp.exchange import choose
from hvd_gradcomp.plan import Plan, Slot, differences
from hvd_gradcomp.policy import DEFAULT_MIN_SIZE, Policy
from hvd_gradcomp.spec import TensorSpec, parse

SPECS = (TensorSpec("weight", (300, 100)), TensorSpec("bias", (100,)), TensorSpec("empty", (0, 5)))


def plan(spec: str = "sign", specs: tuple[TensorSpec, ...] = SPECS, min_size: int = DEFAULT_MIN_SIZE, seed: int = 0,
         exchange: str = "auto", error_feedback: bool = True, ranks: int = 2,
         refuse: Callable[[TensorSpec], str] = lambda spec: "") -> Plan:
    return Plan.make(specs, Policy.make(spec, min_size), ranks=ranks, exchange=exchange, seed=seed,
                     error_feedback=error_feedback, refuse=refuse)


def agree(plans: list[Plan]) -> list[str | None]:
    """What ``check`` says on every rank; None where it is silent."""
    said: list[str | None] = []
    for mine in plans:
        rounds: list[list[bytes]] = []

        def gather(text: bytes, rounds: list[list[bytes]] = rounds, mine: Plan = mine) -> list[bytes]:
            everyone = [[each.digest() for each in plans],
                        [json.dumps(each.describe()).encode() for each in plans]][len(rounds)]
            rank = next(rank for rank, each in enumerate(plans) if each is mine)
            assert text == everyone[rank], "a rank gathers its own"
            rounds.append(everyone)
            return everyone

        try:
            check(mine, gather)
            said.append(None)
            assert len(rounds) == 1
        except DisagreementError as error:
            said.append(str(error))
            assert len(rounds) == 2
    return said


# -- policy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "shape", "min_size", "reason"), [
    ("sign", (16383,), DEFAULT_MIN_SIZE, "small: 16383 elements, min_size=16384"),
    ("sign", (128, 128), DEFAULT_MIN_SIZE, ""),
    ("sign", (1,), 0, ""), ("sign", (), 0, ""), ("sign", (), 1, ""), ("sign", (), 2, "small: 1 elements, min_size=2"),
    ("sign", (0, 5), 0, "empty"), ("none", (1000, 1000), 0, "codec 'none'")])
def test_policy(spec: str, shape: tuple[int, ...], min_size: int, reason: str) -> None:
    codec, why = Policy.make(spec, min_size).choose(TensorSpec("x", shape))
    assert why == reason and (codec is None) == bool(reason)


@pytest.mark.parametrize("min_size", [-1, 1.5, "16", True, None])
def test_policy_refuses(min_size: object) -> None:
    with pytest.raises(SpecError, match="min_size must be a whole number from 0"):
        Policy.make("sign", min_size)  # type: ignore[arg-type]


# -- plan ---------------------------------------------------------------------------------------------------------


def test_every_tensor_gets_a_codec_or_a_reason() -> None:
    made = plan()
    assert {name: (str(slot.codec), slot.reason) for name, slot in made.slots.items()} == {
        "weight": ("sign(block=1024)", ""), "bias": ("None", "small: 100 elements, min_size=16384"),
        "empty": ("None", "empty")}
    assert made.compresses and not plan("none").compresses
    refused = plan(refuse=lambda spec: "float64" if spec.name == "weight" else "")
    assert refused.slots["weight"].codec is None and refused.slots["weight"].reason == "float64"


def test_state_follows_from_the_codec() -> None:
    def layout(spec: str, memory: bool = True) -> dict[str, tuple[int, str]]:
        return plan(spec).slots["weight"].state_layout(memory, ranks=2)

    assert layout("sign") == {"residual": (30_000, "float32")}
    assert layout("sign", memory=False) == {}
    assert layout("uniform(bits=4, stochastic=True)") == {"residual": (30_000, "float32"), "step": (1, "int32")}


def test_state_is_allocated_once() -> None:
    made = plan("uniform(bits=4, stochastic=True)")
    allocated: list[str] = []

    def allocate(name: str, length: int, dtype: str) -> str:
        allocated.append(name)
        return f"{dtype}[{length}]"

    for _ in range(2):
        made.allocate(made.slots["weight"], allocate)
    assert allocated == ["residual", "step"]
    assert made.slots["weight"].state == {"residual": "float32[30000]", "step": "int32[1]"}


@pytest.mark.parametrize(("spec", "exchange", "says"), [
    ("sign", "sum", "cannot be added in flight; use exchange='auto'"),
    ("sign", "sparse_split", r"sign\(block=1024\) does not send entries of its choice; topk does"),
    ("sign", "nosuch", "there is no exchange 'nosuch': 'auto', 'sum', 'gather', 'two_stage', 'sparse_split'")])
def test_impossible_exchanges_are_refused(spec: str, exchange: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        plan(spec, exchange=exchange)


@pytest.mark.parametrize(("spec", "shape", "ranks", "expected"), [
    ("fp16", (1000, 1000), 8, "sum"), ("randomk(ratio=0.1)", (1000, 1000), 8, "sum"),
    ("uniform(bits=8)", (1000, 1000), 2, "gather"), ("uniform(bits=8)", (1000, 1000), 3, "two_stage"),
    ("uniform(bits=8)", (100, 100), 3, "gather"), ("uniform(bits=8)", (100, 100), 64, "two_stage"),
    ("sign", (1000, 1000), 2, "gather"), ("sign", (1000, 1000), 4, "two_stage"),
    ("topk(ratio=0.01)", (1000, 1000), 2, "gather"), ("topk(ratio=0.01)", (1000, 1000), 8, "gather"),
    ("topk(ratio=0.01)", (1000, 1000), 16, "sparse_split"),
    ("topk(ratio=0.1) + uniform(bits=8)", (1000, 1000), 8, "sparse_split"),
    ("topk(ratio=0.01)", (100, 100), 8, "gather"),
    ("svd(rank=4)", (1000, 1000), 64, "gather"), ("powersgd(rank=4) + uniform(bits=8)", (1000, 1000), 64, "gather")])
def test_auto_takes_what_receives_least_unless_a_round_or_its_work_costs_more(
        spec: str, shape: tuple[int, ...], ranks: int, expected: str) -> None:
    assert choose(parse(spec), TensorSpec("w", shape), ranks).name == expected


@pytest.mark.parametrize("ranks", [2, 3, 1000])
def test_state_of_two_stage_has_one_length_on_all_ranks(ranks: int) -> None:
    layout = plan("sign", exchange="two_stage").slots["weight"].state_layout(True, ranks)
    assert layout == {"residual": (30_000, "float32"), "owner_residual": (-(-30_000 // ranks), "float32")}
    assert "owner_residual" not in plan("sign", exchange="two_stage").slots["weight"].state_layout(False, ranks)


# -- agreement ----------------------------------------------------------------------------------------------------


def test_equal_plans_agree() -> None:
    assert agree([plan(), plan(), plan()]) == [None, None, None]
    assert len(plan().digest()) == 16


@pytest.mark.parametrize("who", [0, 1, 2])
def test_every_rank_is_told_which_one_differs(who: int) -> None:
    """Wherever it is. What the differences are called is tested in test_structure.py."""
    plans = [plan(seed=int(rank == who)) for rank in range(3)]
    for text in agree(plans):
        assert text is not None and f"rank {who}: seed is 1, not 0" in text
        assert text.count("rank ") == 2, "the others are not named as different"


def test_between_two_ranks_the_first_is_right() -> None:
    for text in agree([plan(), plan("topk(ratio=0.1)")]):
        assert text is not None and "rank 1: codec is 'topk(ratio=0.1)', not 'sign(block=1024)' (as on rank 0)" in text


def test_several_may_differ() -> None:
    lines = differences([plan().describe(), plan().describe(), plan(seed=1).describe(), plan(seed=2).describe()])
    assert lines == ["rank 2: seed is 1, not 0 (as on rank 0)", "rank 3: seed is 2, not 0 (as on rank 0)"]
    assert differences([plan().describe()] * 3) == []


@pytest.mark.parametrize(("codec", "pieces"), [
    ("topk(ratio=0.01)", 6), ("uniform(bits=8)", 6), ("sign", 6), ("fp16", 6), ("none", 0), ("powersgd(rank=2)", 0),
    ("svd(rank=2)", 0), ("vq(dim=2, codewords=16, codebook='learned', refresh=3)", 0)])
def test_large_tensors_are_cut_where_the_codec_needs_no_whole(codec: str, pieces: int) -> None:
    specs = [TensorSpec("large", (60, 100)), TensorSpec("small", (10, 10))]
    plan = Plan.make(specs, Policy.make(codec, 0), ranks=3, large=5000)
    large = plan.slots["large"]
    assert len(large.cuts) == pieces and not plan.slots["small"].cuts
    assert not Plan.make(specs, Policy.make(codec, 0), ranks=3).slots["large"].cuts
    if pieces:
        assert [begin for begin, _ in large.cuts] == [*range(0, 6000, 1024)] and large.cuts[-1][1] == 6000
        assert large.exchange_text.endswith("in 6 pieces")
        assert plan.for_ranks(2).slots["large"].cuts == large.cuts
        alone = [Slot(TensorSpec("", (end - begin,)), None, large.stages) for begin, end in large.cuts]
        assert large.received(0, 3) == sum(each.received(0, 3) for each in alone)
        assert set(large.state_layout(True, 3)) <= {"residual", "step"}


def test_momentum_is_not_cut() -> None:
    spec = TensorSpec("large", (60, 100))
    assert not Plan.make([spec], Policy.make("topk(ratio=0.01)", 0), ranks=2, large=5000, dgc=True).slots["large"].cuts
