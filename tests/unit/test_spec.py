"""Spec strings: what is understood, what is refused, and what the refusal says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_gradcomp import parse
from hvd_gradcomp.codecs.chain import Chain
from hvd_gradcomp.codecs.registry import CODECS, from_config
from hvd_gradcomp.codecs.topk import TopK
from hvd_gradcomp.codecs.uniform import Uniform
from hvd_gradcomp.errors import SpecError


def test_arguments_arrive() -> None:
    assert parse("uniform(bits=3, stochastic=True, block=None)") == Uniform(bits=3, block=None, stochastic=True)
    assert parse(" topk( ratio = 1e-3 ) ") == TopK(ratio=0.001)


def test_plus_builds_a_chain_in_order() -> None:
    chain = parse("topk(ratio=0.5) + topk(ratio=0.5) + uniform(bits=8)")
    assert isinstance(chain, Chain)
    assert [codec.name for codec in chain.codecs] == ["topk", "topk", "uniform"]


def test_a_codec_is_returned_as_it_is() -> None:
    codec = Uniform(bits=5)
    assert parse(codec) is codec


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_has_defaults_a_text_and_a_use(name: str) -> None:
    codec = parse(name)
    assert parse(str(codec)) == codec
    assert from_config(json.loads(json.dumps(codec.config()))) == codec
    assert 10 < len(codec.use) <= 70


@pytest.mark.parametrize(("spec", "says"), [
    ("nosuch", "Codecs: none, fp16"), ("unifrom(bits=8)", "Did you mean 'uniform'"),
    ("topk(rato=0.1)", "it takes ratio"), ("none(x=1)", "takes no arguments"),
    ("uniform(8)", "arguments are given by name"), ("topk(ratio=0.1", "cannot read codec spec"),
    ("topk(ratio=1+1)", "no plain value"), ("topk(**{})", "no meaning"), ("a.b", "expected a codec"),
    ("topk - sign", "expected a codec"), ("sign + topk", "no values that another codec could encode"),
    ("topk(ratio=0.1, ratio=0.2)", "ratio is given twice"), ("a\0b", "cannot read"),
    ("(" * 500 + "sign", "cannot read"),
    ("1", "expected a codec"), ("none + none", "no values that another codec could encode"),
    ("topk(ratio=-0.1)", "above 0"), ("uniform(stochastic=1)", "True or False"),
    ("", "cannot read"), ("__import__('os')", "arguments are given by name"), ("uniform(bits=0)", "from 1 to 16"),
    ("uniform(bits=17)", "from 1 to 16"), ("uniform(bits=True)", "from 1 to 16"), ("uniform(bits=8.0)", "from 1 to 16"),
    ("uniform(block=0)", "block must be"), ("sign(block=-1)", "block must be"),
    ("uniform(bits=1, symmetric=True)", "at least 2"), ("topk(ratio=0)", "above 0"), ("topk(ratio=1.28)", "at most 1"),
    ("topk(ratio='x')", "above 0"), ("powersgd(rank=0)", "rank"), ("vq(codewords=100)", "codewords"),
    ("randomk(ratio=2)", "ratio"), ("log(bits=17)", "bits"), ("qsgd(levels=0)", "levels"), ("tt(rank=0)", "rank"),
])
def test_refusals_say_what_to_do(spec: str, says: str) -> None:
    with pytest.raises(SpecError, match="(?i)" + says.replace("(", r"\(")) as error:
        parse(spec)
    assert isinstance(error.value, ValueError)


def test_nothing_in_a_spec_is_evaluated(tmp_path) -> None:
    victim = tmp_path / "made"
    for spec in (f"topk(ratio=open({str(victim)!r}, 'w'))", f"open({str(victim)!r}, 'w')"):
        with pytest.raises(SpecError):
            parse(spec)
    assert not victim.exists()


def test_what_is_no_string_is_refused() -> None:
    with pytest.raises(SpecError, match="described by a string"):
        parse(7)  # type: ignore[arg-type]


@given(st.text(max_size=30))
def test_any_text_is_a_codec_or_a_refusal(text: str) -> None:
    try:
        codec = parse(text)
    except SpecError:
        return
    assert parse(str(codec)) == codec


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 16), st.none() | st.integers(1, 10**6), st.booleans())
def test_every_argument_survives_text_and_json(ratio: float, bits: int, block: int | None, stochastic: bool) -> None:
    chain = Chain((TopK(ratio), Uniform(bits=bits, block=block, stochastic=stochastic)))
    assert parse(str(chain)) == chain
    assert from_config(json.loads(json.dumps(chain.config()))) == chain


@pytest.mark.parametrize("config", [
    {}, {"codec": "nosuch"}, {"codec": "topk", "rato": 1}, {"codec": 7}, {"codec": "topk", "ratio": 2}], ids=str)
def test_configurations_of_nothing_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        from_config(config)
