"""The table of specs covers every registered codec, so that nothing is added untested."""

from __future__ import annotations

import dataclasses

import pytest

from hvd_gradcomp import parse
from hvd_gradcomp.codecs.chain import Chain
from hvd_gradcomp.codecs.registry import CODECS
from tests.contract.specs import ALL, SPECS


def test_every_codec_is_in_the_table() -> None:
    assert set(CODECS) | {Chain.name} == set(SPECS), "each codec has one line in tests/contract/specs.py"


@pytest.mark.parametrize("name", SPECS)
def test_the_lines_name_their_codec(name: str) -> None:
    assert SPECS[name], f"no spec of {name} is tested"
    for spec in SPECS[name]:
        assert parse(spec).name == name


@pytest.mark.parametrize("name", CODECS)
def test_every_argument_is_varied(name: str) -> None:
    codecs = [parse(spec) for spec in SPECS[name]]
    for field in dataclasses.fields(CODECS[name]):
        tried = {getattr(codec, field.name) for codec in codecs}
        assert len(tried) > 1, f"{name}: {field.name} is only tested as {tried}"


@pytest.mark.parametrize("spec", ALL)
def test_a_codec_is_frozen_configuration(spec: str) -> None:
    codec = parse(spec)
    assert dataclasses.is_dataclass(codec)
    assert vars(codec) == {field.name: getattr(codec, field.name) for field in dataclasses.fields(codec)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.anything = 1  # type: ignore[attr-defined]
