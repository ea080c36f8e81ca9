"""Codecs that change with the step: a dense start, warm-up stages, ramps.

A stage decides the payload's size, so it depends on the number of reductions done and on nothing
else: all ranks change together. Residuals stay what they are from one stage to the next; a stage
of codec ``none`` sends what the residual still holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvd_gradcomp.codecs.base import Codec, is_int, is_number
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.spec import parse

DGC_RATIOS = (0.25, 0.0625, 0.015625, 0.004)
"""The warm-up of Deep Gradient Compression (Lin et al. 2018, section 3.3)."""


@dataclass(frozen=True)
class Schedule:
    """Stages: ``codecs[i]`` from step ``begins[i]`` on; the last one stays."""

    begins: tuple[int, ...]
    codecs: tuple[Codec, ...]

    def __post_init__(self) -> None:
        if not self.codecs or len(self.begins) != len(self.codecs):
            raise SpecError("a schedule needs one first step for each codec")
        if self.begins[0] != 0 or any(b <= a for a, b in zip(self.begins, self.begins[1:], strict=False)):
            raise SpecError(f"the stages of a schedule begin at step 0 and then later and later, not at {self.begins}")

    def stage(self, step: int) -> int:
        """Index of the stage that the reduction number ``step`` (from 0) falls in."""
        return bisect_right(self.begins, step) - 1

    def __str__(self) -> str:
        return ", ".join(f"{begin}: {codec}" for begin, codec in zip(self.begins, self.codecs, strict=True))


def schedule(stages: Mapping[int, str | Codec]) -> Schedule:
    """The schedule of ``{first step: spec or codec}``, in any order. Raises SpecError."""
    for begin in stages:
        if not is_int(begin, 0):
            raise SpecError(f"a stage begins at a whole step from 0, not at {begin!r}")
    begins = tuple(sorted(stages))
    return Schedule(begins, tuple(parse(stages[begin]) for begin in begins))


def warmup(spec: str | Codec, steps: int, *, begin: int = 0, ratios: Sequence[float] = DGC_RATIOS) -> Schedule:
    """Dense until ``begin``; then equally long stages of falling ``ratios`` within ``steps``; then ``spec``.

    Args:
        spec: a codec with an argument ``ratio``, alone or at the head of a chain.

    Raises:
        SpecError: the codec has no ratio, or there are fewer steps than stages.
    """
    from hvd_gradcomp.codecs.chain import Chain

    final = parse(spec)
    head = final.codecs[0] if isinstance(final, Chain) else final
    if not hasattr(head, "ratio"):
        raise SpecError(f"warm-up lowers a ratio, and {head} has none")
    if not is_int(steps, len(ratios)) or not is_int(begin, 0):
        raise SpecError(f"warm-up over {len(ratios)} stages needs at least as many steps (not {steps!r}), and begins "
                        f"at a step from 0 (not {begin!r})")
    stages: dict[int, str | Codec] = {0: "none"} if begin else {}
    for i, ratio in enumerate(ratios):
        codec: Codec = replace(head, ratio=ratio)  # type: ignore[call-arg]
        if isinstance(final, Chain):
            codec = Chain((codec, *final.codecs[1:]))
        stages[begin + i * steps // len(ratios)] = codec
    stages[begin + steps] = final
    return schedule(stages)


def dgc(ratio: float, *, warmup_steps: int = 0, warmup_schedule: Sequence[float] | None = None, begin_step: int = 0,
        value_codec: str | Codec | None = None, threshold: str = "exact") -> Schedule | Codec:
    """The stages of Deep Gradient Compression: dense, warm-up, then ``ratio`` for good.

    Args:
        ratio: share of the entries that is sent; from 1 on everything is, dense.
        warmup_steps: number of steps over which the equally long stages of the warm-up go; 0 for none.
        warmup_schedule: kept ratios of these stages; by default those of :data:`DGC_RATIOS` above ``ratio``.
        begin_step: the step before which everything is dense.
        value_codec: encodes the kept values, such as ``"uniform(bits=8)"``.
        threshold: how the entries are found, see ``topk``.

    Raises:
        SpecError: an argument that cannot be, by its name.
    """
    for name, value in [("ratio", ratio), *(("warmup_schedule", each) for each in warmup_schedule or ())]:
        if not is_number(value) or not value > 0:
            raise SpecError(f"{name} must be above 0, not {value!r}")
    ratios = tuple(r for r in DGC_RATIOS if r > ratio) if warmup_schedule is None else tuple(warmup_schedule)
    if not is_int(begin_step, 0):
        raise SpecError(f"begin_step must be a whole number from 0, not {begin_step!r}")
    if not is_int(warmup_steps, 0) or 0 < warmup_steps < len(ratios):
        raise SpecError(f"warmup_steps must be 0 or a whole number from {len(ratios)}, the number of stages in the "
                        f"warm-up, not {warmup_steps!r}")
    begins = {begin_step + i * warmup_steps // len(ratios): r for i, r in enumerate(ratios)} if warmup_steps else {}
    stages = {0: parse("none")}
    for begin, kept in {**begins, begin_step + warmup_steps: ratio}.items():
        codec = _topk(kept, threshold, value_codec)
        if codec != stages[max(stages)]:
            stages[begin] = codec
    return schedule(stages) if len(stages) > 1 else stages[0]


def _topk(ratio: float, threshold: str, value_codec: str | Codec | None) -> Codec:
    if ratio >= 1:
        return parse("none")
    spec = f"topk(ratio={float(ratio)!r}, threshold={threshold!r})"
    return parse(spec if value_codec is None else f"{spec} + {value_codec}")
