"""Codecs by layer and by step."""

import numpy as np
import pytest

from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.policy import AUTO, Policy, kind
from hvd_gradcomp.schedule import DGC_RATIOS, Schedule, schedule, warmup
from hvd_gradcomp.spec import TensorSpec, parse


def choice(policy: Policy, name: str, *shape: int) -> tuple[str, str]:
    codec, reason = policy.choose(TensorSpec(name, shape))
    return str(codec), reason


def test_patterns_decide_in_order() -> None:
    policy = Policy.make({"*.bias": "none", "embed*": "uniform(bits=8)", "*": "topk(ratio=0.01)"}, min_size=0)
    assert choice(policy, "fc.bias", 512)[0] == "None"
    assert choice(policy, "embedding.weight", 512, 4)[0] == "uniform(bits=8)"
    assert choice(policy, "fc.weight", 512, 4)[0] == "topk(ratio=0.01)"


def test_rules_by_kind_size_and_dimensions() -> None:
    policy = Policy.make({"rules": [{"ndim": 4, "codec": "sign"}, {"kind": "vector", "codec": "none"},
                                    {"min_numel": 1000, "codec": "fp16"}, {"max_numel": 10, "codec": "bf16"}],
                          "default": "uniform(bits=4)"}, min_size=0)
    assert choice(policy, "conv", 8, 3, 3, 3)[0].startswith("sign")
    assert choice(policy, "norm", 64) == ("None", "codec 'none' by rule kind=vector -> none")
    assert choice(policy, "w", 40, 25)[0] == "fp16"
    assert choice(policy, "w", 2, 5)[0] == "bf16"
    assert choice(policy, "w", 20, 5)[0] == "uniform(bits=4)"


def test_no_rule_fits_is_said() -> None:
    policy = Policy.make({"rules": [{"name": "a", "codec": "sign"}]}, min_size=0)
    assert policy.choose(TensorSpec("b", (4,))) == (None, "no rule fits")


def test_yaml_file(tmp_path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("rules:\n  - {kind: vector, codec: none}\ndefault: {0: none, 10: topk(ratio=0.01)}\n")
    policy = Policy.make(str(file), min_size=0)
    codec, _ = policy.choose(TensorSpec("w", (8, 8)))
    assert isinstance(codec, Schedule) and codec.begins == (0, 10)
    with pytest.raises(SpecError, match="cannot read the policy file"):
        Policy.make(str(tmp_path / "missing.yaml"))


@pytest.mark.parametrize("bad", [
    {"rules": [{"codec": "sign", "nam": "x"}]}, {"rules": [{"name": "x"}]}, {"rules": [], "defalt": "sign"},
    {"rules": [{"codec": "sign", "kind": "conv"}]}, {"rules": [{"codec": "sign", "ndim": -1}]}, {"*": "nosuch"},
    {1: "none", 5: "sign"}, {0: "none", "5": "sign"}, {-1: "sign"}, {0: "none", 2.5: "sign"}, 7, {},
])
def test_bad_policies_are_refused(bad) -> None:
    with pytest.raises(SpecError):
        Policy.make(bad)


@pytest.mark.parametrize(("name", "shape", "want"), [
    ("fc.bias", (10,), "vector"), ("temperature", (), "vector"), ("emb.weight", (100, 8), "embedding"),
    ("layer.0.attn.q_proj.weight", (64, 64), "attention"), ("conv.weight", (8, 3, 3, 3), "convolution"),
    ("fc.weight", (64, 32), "dense"), ("row", (1, 64), "vector"),
])
def test_kinds(name: str, shape: tuple[int, ...], want: str) -> None:
    assert kind(TensorSpec(name, shape)) == want


def test_auto_gives_every_kind_a_codec() -> None:
    policy = Policy.make("auto", min_size=0)
    assert len(policy.rules) == len(AUTO["rules"])
    assert choice(policy, "fc.bias", 100)[0] == "None"
    assert choice(policy, "conv.weight", 64, 64, 3, 3)[0] == "powersgd(rank=4)"
    assert choice(policy, "head.weight", 2048, 2048)[0] == "topk(ratio=0.01) + uniform(bits=8)"
    assert choice(policy, "fc.weight", 64, 64)[0] == "uniform(bits=4)"


def test_stages() -> None:
    stages = schedule({100: "topk(ratio=0.01)", 0: "none", 50: "topk(ratio=0.25)"})
    assert [stages.stage(step) for step in (0, 49, 50, 99, 100, 10_000)] == [0, 0, 1, 1, 2, 2]


def test_warmup_is_dgcs_ramp() -> None:
    """Case H3: it begins at its step, in equally long stages, and the last ratio stays."""
    stages = warmup("topk(ratio=0.001) + uniform(bits=8)", 4, begin=10)
    ratios = [getattr(stages.codecs[stages.stage(step)].codecs[0], "ratio", None) if step >= 10 else None
              for step in range(9, 16)]
    assert str(stages.codecs[0]) == "none" and stages.stage(9) == 0
    assert ratios == [None, *DGC_RATIOS, 0.001, 0.001]
    assert stages.codecs[-1] == parse("topk(ratio=0.001) + uniform(bits=8)")
    for bad in (("sign", 10), ("topk(ratio=0.01)", 3)):
        with pytest.raises(SpecError):
            warmup(*bad)


def test_changing_the_stage_keeps_the_residual() -> None:
    """Identity T over a sparse, a dense and another sparse stage, with different codecs and exchanges."""
    world = LocalWorld({0: "topk(ratio=0.1)", 3: "none", 4: "sign"}, {"w": (50,)}, 3)
    rng = np.random.default_rng(0)
    total = want = np.zeros(50)
    for step in range(7):
        grads = [{"w": rng.standard_normal(50).astype(np.float32)} for _ in range(3)]
        want = want + sum(g["w"].astype(float) for g in grads) / 3
        total = total + world.step(grads)[0]["w"]
        residual = sum(plan.slots["w"].state["residual"].astype(float) for plan in world.plans) / 3
        np.testing.assert_allclose(total + residual, want, rtol=0, atol=1e-5)
        if step == 3:
            np.testing.assert_allclose(residual, 0.0, atol=1e-6)  # the dense stage sent what was left
        else:
            assert np.abs(residual).max() > 1e-3


def test_a_void_step_does_not_count_towards_a_stage() -> None:
    world = LocalWorld({0: "none", 1: "topk(ratio=0.5)"}, {"w": (4,)}, 1)
    void = world.step([{"w": np.array([np.inf, 1, 1, 1], np.float32)}])[0]["w"]
    assert np.isnan(void).all()
    dense = world.step([{"w": np.array([4, 3, 2, 1], np.float32)}])[0]["w"]
    np.testing.assert_array_equal(dense, [4, 3, 2, 1])
    np.testing.assert_array_equal(world.step([{"w": np.array([4, 3, 2, 1], np.float32)}])[0]["w"], [4, 3, 0, 0])
