"""Which codec a tensor gets, and the reason when it gets none."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hvd_gradcomp.codecs.base import Codec, is_int
from hvd_gradcomp.codecs.dense import Dense
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.schedule import Schedule, schedule
from hvd_gradcomp.spec import TensorSpec, parse

DEFAULT_MIN_SIZE = 16384
"""Elements from which compression is taken to pay; smaller tensors go with Horovod, which fuses
them. An estimate of the break-even on ordinary Ethernet, not a measurement."""

KINDS = ("vector", "embedding", "attention", "convolution", "dense")

AUTO: dict[str, Any] = {"rules": [
    {"kind": "vector", "codec": "none"},
    {"kind": "embedding", "codec": "uniform(bits=8)"},
    {"kind": "attention", "codec": "powersgd(rank=4)"},
    {"kind": "convolution", "codec": "powersgd(rank=4)"},
    {"kind": "dense", "min_numel": 1 << 20, "codec": "topk(ratio=0.01) + uniform(bits=8)"},
    {"kind": "dense", "codec": "uniform(bits=4)"},
]}
"""The preset ``auto``: biases and norms dense, convolutions and attention projections low rank, large
dense layers sparse, other dense layers quantized, embeddings gently."""


def kind(spec: TensorSpec) -> str:
    """The layer kind that shape and name suggest, one of :data:`KINDS`.

    Frameworks give a compressor names and shapes only, so this reads the usual names: ``emb``,
    ``wte``, ``wpe`` for embeddings; ``attn``, ``attention``, ``q_proj`` and the like for attention.
    """
    name = spec.name.lower()
    if sum(size > 1 for size in spec.shape) <= 1:
        return "vector"
    if any(word in name for word in ("emb", "wte", "wpe")):
        return "embedding"
    if any(word in name for word in ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv")):
        return "attention"
    return "convolution" if len(spec.shape) > 2 else "dense"


@dataclass(frozen=True)
class Rule:
    """A codec for the tensors that fit every condition given.

    Args:
        codec: what they get.
        name: shell pattern over the whole name, such as ``*.bias``.
        kind: one of :data:`KINDS`.
        ndim: number of dimensions.
        min_numel, max_numel: bounds of the number of elements, both included.
    """

    codec: Codec | Schedule
    name: str | None = None
    kind: str | None = None
    ndim: int | None = None
    min_numel: int | None = None
    max_numel: int | None = None

    def __post_init__(self) -> None:
        if self.name is not None and type(self.name) is not str:
            raise SpecError(f"a rule's name is a pattern such as '*.bias', not {self.name!r}")
        if self.kind is not None and self.kind not in KINDS:
            raise SpecError(f"a rule's kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        for field in ("ndim", "min_numel", "max_numel"):
            if getattr(self, field) is not None and not is_int(getattr(self, field), 0):
                raise SpecError(f"a rule's {field} is a whole number from 0, not {getattr(self, field)!r}")

    def fits(self, spec: TensorSpec) -> bool:
        """Whether a tensor meets every condition."""
        return ((self.name is None or fnmatch.fnmatchcase(spec.name, self.name))
                and (self.kind is None or kind(spec) == self.kind)
                and (self.ndim is None or len(spec.shape) == self.ndim)
                and (self.min_numel is None or spec.numel >= self.min_numel)
                and (self.max_numel is None or spec.numel <= self.max_numel))

    def __str__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self)[1:]}
        conditions = [f"{name}={value}" for name, value in given.items() if value is not None]
        return f"{' '.join(conditions) or '*'} -> {self.codec}"


@dataclass(frozen=True)
class Policy:
    """Rules in order: the first that fits a tensor of at least ``min_size`` elements decides."""

    rules: tuple[Rule, ...]
    min_size: int = DEFAULT_MIN_SIZE

    def __post_init__(self) -> None:
        if not is_int(self.min_size, 0):
            raise SpecError(f"min_size must be a whole number from 0 (compress everything), not {self.min_size!r}")

    @classmethod
    def make(cls, compression: Any, min_size: int = DEFAULT_MIN_SIZE) -> Policy:
        """The policy of whatever users pass as ``compression``.

        Args:
            compression: a spec string or codec for all tensors; ``"auto"`` (see :data:`AUTO`); a
                schedule, or a dict with whole numbers as keys: ``{0: "none", 500: "sign"}``; a dict of
                name patterns: ``{"*.bias": "none", "*": "sign"}``; a dict with ``rules`` (conditions
                and ``codec`` each, see :class:`Rule`) and perhaps ``default``; the path of a YAML file
                (ending in ``.yaml`` or ``.yml``) that holds such a dict; or a Policy's rules.

        Raises:
            SpecError: anything else, or a rule that cannot be.
        """
        return cls(_rules(compression), min_size)

    def choose(self, spec: TensorSpec) -> tuple[Codec | Schedule | None, str]:
        """``(codec, "")``, or ``(None, why it is not compressed)``."""
        if spec.numel == 0:
            return None, "empty"
        rule = next((rule for rule in self.rules if rule.fits(spec)), None)
        if rule is None:
            return None, "no rule fits"
        if isinstance(rule.codec, Dense):
            return None, "codec 'none'" if len(self.rules) == 1 else f"codec 'none' by rule {rule}"
        if spec.numel < self.min_size:
            return None, f"small: {spec.numel} elements, min_size={self.min_size}"
        return rule.codec, ""

    def __str__(self) -> str:
        if len(self.rules) == 1 and str(self.rules[0]).startswith("* -> "):
            return str(self.rules[0].codec)
        return "; ".join(map(str, self.rules))


def _rules(compression: Any) -> tuple[Rule, ...]:
    if isinstance(compression, Path) or (isinstance(compression, str) and compression.endswith((".yaml", ".yml"))):
        return _rules(_load(Path(compression)))
    if compression == "auto":
        return _rules(AUTO)
    if isinstance(compression, Sequence) and compression and all(isinstance(rule, Rule) for rule in compression):
        return tuple(compression)
    if not isinstance(compression, Mapping):
        return (Rule(_codec(compression)),)
    if "rules" in compression:
        unknown = compression.keys() - {"rules", "default"}
        if unknown:
            raise SpecError(f"a policy has 'rules' and perhaps 'default', not {sorted(unknown)}")
        rules = [_rule(each) for each in compression["rules"]]
        return (*rules, Rule(_codec(compression["default"]))) if "default" in compression else tuple(rules)
    if compression and all(isinstance(key, str) for key in compression):
        return tuple(Rule(_codec(codec), name=pattern) for pattern, codec in compression.items())
    return (Rule(schedule(compression)),)


def _rule(entry: Any) -> Rule:
    known = [f.name for f in fields(Rule)]
    if not isinstance(entry, Mapping) or "codec" not in entry or not entry.keys() <= set(known):
        raise SpecError(f"a rule is a dict with 'codec' and conditions among {', '.join(known[1:])}, not {entry!r}")
    return Rule(**{**entry, "codec": _codec(entry["codec"])})


def _codec(value: Any) -> Codec | Schedule:
    if isinstance(value, Schedule):
        return value
    return schedule(value) if isinstance(value, Mapping) else parse(value)


def _load(file: Path) -> Any:
    import yaml

    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SpecError(f"cannot read the policy file {file}: {error}") from None
    if not isinstance(loaded, Mapping):
        raise SpecError(f"the policy file {file} must hold a mapping: name patterns, or 'rules'")
    return loaded
