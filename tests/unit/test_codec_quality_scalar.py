"""How good the scalar, sparse and vector codecs are: what their definitions promise, in numbers.

"Gradients" here are synthetic, with the heavy tails and the uneven scales of real ones; what the
codecs do to real ones is measured by a committed command (docs/codecs.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy.typing import NDArray

from hvd_gradcomp import parse, payload
from hvd_gradcomp.codecs import indices, threshold
from hvd_gradcomp.codecs.base import Codec, Ctx
from hvd_gradcomp.codecs.registry import from_config
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import PayloadError, SpecError
from hvd_gradcomp.ops import exact, rng
from hvd_gradcomp.ops.base import Array, Ops
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.ops.tensorflow import TensorflowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.spec import TensorSpec

Floats = NDArray[np.float32]
NUMPY = NumpyOps()
BACKENDS: dict[str, tuple[Ops, Callable[[NDArray[Any]], Array]]] = {
    "numpy": (NUMPY, np.array), "torch": (TorchOps(), lambda a: torch.from_numpy(a.copy())),
    "tensorflow": (TensorflowOps(), tf.constant)}
OTHERS = pytest.mark.parametrize("backend", ["torch", "tensorflow"])
ALL = pytest.mark.parametrize("backend", BACKENDS)


def context(codec: Codec, n: int, *, ops: Ops = NUMPY, step: int = 0, seed: int = 0, rank: int = 0,
            error_feedback: bool = True, shape: tuple[int, ...] | None = None) -> Ctx:
    spec = TensorSpec("tensor", shape or (n,))
    state = {name: ops.zeros((length,), dtype) for name, (length, dtype) in codec.state(spec).items()}
    return Ctx(ops, spec, 1, rank, seed, {**state, "step": ops.constant([step], "int32")},
               error_feedback=error_feedback)


def sent(codec: Codec, x: Floats, **options: Any) -> Floats:
    """What arrives of ``x``."""
    ctx = context(codec, x.size, **options)
    return codec.decode(codec.encode(x, ctx), np.zeros(x.size, np.float32), ctx)


def draws(codec: Codec, x: Floats, count: int) -> NDArray[np.float64]:
    return np.array([sent(codec, x, step=step, error_feedback=False) for step in range(count)], np.float64)


def heavy(n: int, key: int = 0) -> Floats:
    """Student's t with 3 degrees of freedom, in stretches of 256 whose scales differ by e either way."""
    r = np.random.default_rng(key)
    scales = np.exp(r.normal(size=-(-n // 256)))
    return (r.standard_t(3, n) * np.repeat(scales, 256)[:n]).astype(np.float32)


# -- configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [
    "log(bits=0)", "log(bits=1)", "log(bits=17)", "log(bits=8.0)", "log(delta=0)", "log(delta=2)", "log(block=0)",
    "qsgd(levels=0)", "qsgd(levels=32768)", "qsgd(levels=True)", "qsgd(block=0)", "ternary(block=0)",
    "ternary(block=-1)", "natural(bits=8)", "randomk(ratio=0)", "randomk(ratio=1.5)", "randomk(shared=1)",
    "blocktopk(ratio=0)", "blocktopk(ratio=2)", "blocktopk(block=0)", "blocktopk(block=None)", "blocktopk(axis=1)",
    "topk(threshold='fast')", "topk(index=32)", "vq(codewords=100)", "vq(codewords=1)", "vq(codewords=8192)",
    "vq(dim=0)", "vq(dim=65)", "vq(codebook='other')", "vq(refresh=0)", "vq(block=0)",
    "topk(ratio=0.1) + vq(codebook='learned')", "ternary + log(bits=8)"])
def test_impossible_arguments_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        parse(spec)


@pytest.mark.parametrize("spec", [
    "log(bits=5, delta=0.01)", "qsgd(levels=7, block=None)", "ternary(block=5)", "natural",
    "randomk(ratio=0.2, shared=False)", "blocktopk(ratio=0.1, axis=0)", "topk(ratio=0.1, threshold='sampled')",
    "vq(dim=4, codewords=16, codebook='learned', refresh=3)"])
def test_configuration_round_trips(spec: str) -> None:
    codec = parse(spec)
    assert from_config(json.loads(json.dumps(codec.config()))) == codec == parse(str(codec))


# -- stochastic scalar codecs -------------------------------------------------------------------------------------


def _qsgd_sigma(x: Floats, levels: int) -> NDArray[np.float64]:
    step = np.linalg.norm(x.astype(np.float64)) / levels
    fraction = np.abs(x) / step % 1.0
    return step * np.sqrt(fraction * (1.0 - fraction))


def _ternary_sigma(x: Floats) -> NDArray[np.float64]:
    size = np.abs(x.astype(np.float64))
    return np.sqrt(size * (size.max() - size))


def _natural_sigma(x: Floats) -> NDArray[np.float64]:
    low = np.exp2(np.floor(np.log2(np.abs(x.astype(np.float64)))))
    return np.sqrt((np.abs(x) - low) * (2 * low - np.abs(x)))


SIGMA: dict[str, Callable[[Floats], NDArray[np.float64]]] = {
    "qsgd": lambda x: _qsgd_sigma(x, 127), "qsgd(levels=2)": lambda x: _qsgd_sigma(x, 2),
    "ternary": _ternary_sigma, "natural": _natural_sigma}


@pytest.mark.parametrize("spec", SIGMA)
def test_unbiased_with_the_variance_of_its_definition(spec: str) -> None:
    x, count = np.random.default_rng(1).normal(size=60).astype(np.float32), 4000
    values = draws(parse(spec), x, count)
    sigma = SIGMA[spec](x)
    assert (np.abs(values.mean(axis=0) - x) <= 5 * sigma / math.sqrt(count) + 1e-6).all()
    assert values.var(axis=0).sum() == pytest.approx((sigma**2).sum(), rel=0.1)


@pytest.mark.parametrize(("spec", "grid"), [
    ("ternary", [0.3, -0.3, 0.0, 0.3, 0.0]), ("natural", [0.25, -1024.0, 0.0, 2.0**-100, -0.5]),
    ("qsgd(levels=4)", [3.0, -3.0, 3.0, 3.0]), ("qsgd", [0.0, -0.7, 0.0]), ("qsgd(levels=5)", [3.0, 4.0, 0.0])])
def test_values_on_a_level_never_move(spec: str, grid: list[float]) -> None:
    x = np.array(grid, np.float32)
    assert np.abs(draws(parse(spec), x, 300) - x).max() <= 1e-6 * np.abs(x).max()


def test_ternary_keeps_with_probability_in_proportion_to_size() -> None:
    """Case A6."""
    values = draws(parse("ternary"), np.array([0.5, -0.25, 0.0], np.float32), 20_000)
    assert np.abs((values != 0).mean(axis=0) - [1.0, 0.5, 0.0]).max() < 5 * 0.5 / math.sqrt(20_000)
    assert np.abs(values.mean(axis=0) - [0.5, -0.25, 0.0]).max() < 0.006


@pytest.mark.parametrize("spec", ["ternary", "ternary(block=None)", "qsgd(levels=1)", "qsgd(levels=1, block=None)"])
def test_error_feedback_does_not_blow_up_a_coarse_codec(spec: str) -> None:
    """With the unbiased scale in place of the fitted one the residual reaches 10 to 20 times the
    gradient (ternary), or grows by a factor every step (qsgd)."""
    world = LocalWorld(spec, {"w": (4096,)}, 1)
    norms = []
    for step in range(60):
        grad = np.random.default_rng(step).normal(size=4096).astype(np.float32)
        world.step([{"w": grad}])
        norms.append(np.linalg.norm(world.plans[0].slots["w"].state["residual"]) / np.linalg.norm(grad))
    assert max(norms) < 8


# -- log ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "delta"), [(8, 0.001), (6, 0.001), (4, 0.01), (12, 1e-6)])
def test_log_keeps_the_relative_error_of_small_values_within_one_step(bits: int, delta: float) -> None:
    ratio = (1 + 1 / delta) ** (1 / (2 ** (bits - 1) - 1))
    sizes = np.geomspace(delta, 1.0, 1000).astype(np.float32)
    x = np.where(np.arange(1000) % 2 == 0, sizes, -sizes)
    error = np.abs(sent(parse(f"log(bits={bits}, delta={delta})"), x) - x) / sizes
    # At delta a level is twice as far, relatively, as far above it; half of that by rounding to the nearest.
    assert error.max() <= (ratio - 1) * 1.0001
    assert error[sizes > 20 * delta].max() <= (ratio - 1) * 0.53


def test_log_beats_uniform_on_the_small_values() -> None:
    x = heavy(1 << 14)
    small = np.abs(x) < 0.01 * np.abs(x).max()
    errors = {spec: np.abs(sent(parse(spec), x) - x)[small] / np.abs(x[small])
              for spec in ("log(bits=8)", "uniform(bits=8)")}
    assert np.median(errors["log(bits=8)"]) < 0.5 * np.median(errors["uniform(bits=8)"])


@pytest.mark.parametrize("bits", [2, 8, 16])
def test_log_is_exact_at_zero_and_at_the_largest(bits: int) -> None:
    x = np.array([0.0, 7.3, -7.3, 0.0], np.float32)
    assert np.array_equal(sent(parse(f"log(bits={bits})"), x), x)


# -- random-k -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_randomk_is_unbiased_without_error_feedback(shared: bool) -> None:
    """Case G6: over seeds the mean is the gradient, chosen entries are 10 times as large, others 0."""
    x, count = np.arange(100, dtype=np.float32), 20_000
    codec = parse(f"randomk(ratio=0.1, shared={shared})")
    total = np.zeros(100)
    for seed in range(count):
        out = sent(codec, x, seed=seed, error_feedback=False)
        chosen = out != 0
        assert np.allclose(out[chosen], 10 * x[chosen]) and 9 <= chosen.sum() <= 10
        total += out
    assert np.abs(total / count - x).max() <= (5 * 3 * x / math.sqrt(count)).max()
    assert (np.abs(total / count - x) <= 5 * 3 * x / math.sqrt(count)).all()


def test_randomk_with_error_feedback_has_no_factor() -> None:
    x = np.arange(1, 101, dtype=np.float32)
    out = sent(parse("randomk(ratio=0.1)"), x)
    assert (out != 0).sum() == 10 and np.array_equal(out[out != 0], x[out != 0])


@pytest.mark.parametrize(("n", "k"), [(103, 10), (7, 5), (64, 64), (10, 1), (1, 1)])
def test_a_sample_is_distinct_and_every_position_equally_likely(n: int, k: int) -> None:
    count, hits = 4000, np.zeros(n)
    spec = TensorSpec("tensor", (n,))
    for step in range(count):
        places = rng.sample(NUMPY, n, k, seed=0, spec=spec, step=np.array([step], np.int32), rank=0)
        assert len(set(places.tolist())) == k and places.min() >= 0 and places.max() < n
        hits[places] += 1
    p = k / n
    assert np.abs(hits / count - p).max() <= 5 * math.sqrt(p * (1 - p) / count)


def test_own_randomness_differs_by_rank_and_shared_does_not() -> None:
    x = np.arange(1, 1001, dtype=np.float32)
    for spec, same in (("randomk(ratio=0.05)", True), ("randomk(ratio=0.05, shared=False)", False)):
        one, two = (sent(parse(spec), x, rank=rank) for rank in (0, 1))
        assert np.array_equal(one, two) == same
    assert parse("randomk(ratio=0.05)").summable and not parse("randomk(ratio=0.05, shared=False)").summable


# -- top-k and its indices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "least"), [
    ("topk(ratio=0.001) + uniform(bits=8)", 1500), ("topk(ratio=0.001)", 725), ("log(bits=8)", 3.95),
    ("ternary", 19.5), ("natural", 3.99), ("qsgd", 3.95), ("vq", 31), ("randomk(ratio=0.001)", 999),
    ("blocktopk(ratio=0.01)", 98)])
def test_ratio_on_25_million_elements(spec: str, least: float) -> None:
    n = 25_000_000
    assert 4 * n / payload.nbytes(parse(spec).layout(TensorSpec("tensor", (n,)))) >= least


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 10), (10, 9), (1000, 1), (4097, 33), (2**20, 1024), (2**31 - 1, 3)])
def test_coded_indices_come_back_and_are_small(n: int, k: int) -> None:
    r = np.random.default_rng(n)
    spread = np.unique(r.integers(0, n, 4 * k))[:k] if n > 4 * k else np.arange(n)[:k]
    for chosen in (spread, np.arange(k), np.arange(n - k, n)):
        parts = indices.encode(NUMPY, chosen.astype(np.int32), n)
        assert {name: (array.size, str(array.dtype)) for name, array in parts.items()} == {
            part.name: (part.length, part.dtype) for part in indices.layout(n, len(chosen))}
        assert np.array_equal(indices.decode(NUMPY, parts, n, len(chosen)), chosen)
    rounding = 2 * 8 * 31  # each part ends on whole bytes, the low bits on groups of 8 codes
    assert 8 * sum(part.length for part in indices.layout(n, k)) <= k * (math.log2(n / k) + 2) + rounding


@ALL
def test_hostile_coded_indices_are_refused(backend: str) -> None:
    ops, array = BACKENDS[backend]
    codec, x = parse("topk(ratio=0.1)"), heavy(1001)
    ctx = context(codec, 1001, ops=ops)
    good = {name: np.asarray(part) for name, part in codec.encode(array(x), ctx).items()}
    empty, full = np.zeros_like(good["index_high"]), np.full_like(good["index_high"], 255)
    # the 100 ones at the very end of the bitmap's 225 bits, and the largest low bits: index 8 * 125 + 7
    last = np.packbits(np.arange(8 * empty.size) >= 125, bitorder="little")
    for bad in ({"index_high": empty}, {"index_high": full},
                {"index_high": last, "index_low": np.full_like(good["index_low"], 255)}):
        parts = {name: array(part) for name, part in {**good, **bad}.items()}
        with pytest.raises((PayloadError, tf.errors.InvalidArgumentError)):
            codec.decode(parts, ops.zeros((1001,)), ctx)


def test_a_sampled_threshold_selects_the_exact_entries() -> None:
    x = heavy(1 << 18)
    for step in range(5):
        assert np.array_equal(sent(parse("topk(ratio=0.005, threshold='sampled')"), x, step=step),
                              sent(parse("topk(ratio=0.005)"), x))


@pytest.mark.parametrize("kind", ["heavy", "gauss", "laplace", "mostly zero"])
@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_the_statistical_threshold_reaches_the_asked_density(kind: str, ratio: float) -> None:
    n, r = 1 << 18, np.random.default_rng(3)
    x = {"heavy": heavy(n), "gauss": r.normal(size=n), "laplace": r.laplace(size=n),
         "mostly zero": heavy(n) * (r.random(n) < 0.3)}[kind].astype(np.float32)
    codec, k = parse("topk(threshold='statistical')"), round(ratio * n)
    least = threshold.statistical(x, k, context(codec, n))
    assert 0.8 * k <= (np.abs(x).view(np.int32) >= least).sum() <= 1.2 * k
    assert np.array_equal(sent(parse(f"topk(ratio={ratio}, threshold='statistical')"), x),
                          sent(parse(f"topk(ratio={ratio})"), x))


@ALL
def test_too_few_above_the_threshold_are_filled_up_from_the_lowest_indices(backend: str) -> None:
    ops, array = BACKENDS[backend]
    keys = np.array([5, 1, 9, 9, 0, 7], np.int32)
    for least, k, right in ((9, 4, [0, 1, 2, 3]), (6, 2, [2, 3]), (6, 1, [2]), (10, 2, [0, 1]), (0, 6, list(range(6)))):
        got = ops.top_indices_above(array(keys), array(np.array([least], np.int32)), k)
        assert np.asarray(got).tolist() == right and str(ops.dtype(got)) == "int32"


# -- block top-k --------------------------------------------------------------------------------------------------


def test_blocktopk_sends_the_blocks_of_most_energy() -> None:
    x = np.ones(10 * 8, np.float32)
    x[24:32], x[75] = -2.0, 6.0  # energies 32 and 43
    out = sent(parse("blocktopk(ratio=0.2, block=8)"), x)
    assert np.array_equal(np.flatnonzero(out), [*range(24, 32), *range(72, 80)])
    assert np.array_equal(out[out != 0], x[out != 0])


def test_equal_blocks_go_by_lowest_index_and_the_last_may_be_short() -> None:
    x = np.ones(19, np.float32)
    assert np.array_equal(np.flatnonzero(sent(parse("blocktopk(ratio=0.4, block=4)"), x)), range(8))
    x[-1] = 5.0
    for spec in ("blocktopk(ratio=0.2, block=4)", "blocktopk(ratio=0.2, block=4) + uniform(bits=8)"):
        out = sent(parse(spec), x)
        assert np.array_equal(np.flatnonzero(out), [16, 17, 18]) and np.allclose(out[16:], x[16:], atol=0.02)


def test_whole_rows() -> None:
    x = np.ones((6, 5, 2), np.float32)
    x[4] *= 3
    out = sent(parse("blocktopk(ratio=0.1, axis=0)"), x.ravel(), shape=x.shape).reshape(x.shape)
    assert np.array_equal(out[4], x[4]) and np.count_nonzero(out) == 10


# -- vector quantization ------------------------------------------------------------------------------------------


def correlated(shape: tuple[int, int], key: int) -> Floats:
    """Heavy-tailed values that hang together in groups of 8, as neighboring weights of a filter do."""
    mix = np.random.default_rng(0).normal(size=(8, 8)) * np.geomspace(2, 0.2, 8)[:, None]
    r = np.random.default_rng(key)
    return (r.standard_t(3, (shape[0], shape[1] // 8, 8)) @ mix).reshape(shape).astype(np.float32)


@pytest.mark.parametrize("error_feedback", [False, True])
def test_the_learned_codebook_beats_the_fixed_one(error_feedback: bool) -> None:
    errors = {}
    for spec in ("vq", "vq(codebook='learned', refresh=16)"):
        world, last = LocalWorld(spec, {"w": (64, 512)}, 2, error_feedback=error_feedback), []
        for step in range(64):
            grads = [{"w": correlated((64, 512), 2 * step + rank)} for rank in range(2)]
            out = world.step(grads)[0]["w"]
            mean = (grads[0]["w"] + grads[1]["w"]) / 2
            last.append(np.linalg.norm(out - mean) / np.linalg.norm(mean))
        errors[spec] = np.mean(last[-8:])
    assert errors["vq(codebook='learned', refresh=16)"] < 0.85 * errors["vq"]


def test_a_learned_codebook_is_the_same_on_every_rank_and_counted_in_the_payload() -> None:
    spec = TensorSpec("w", (4096,))
    world = LocalWorld("vq(codebook='learned', refresh=8)", {"w": (4096,)}, 3)
    for step in range(10):
        world.step([{"w": heavy(4096, 3 * step + rank)} for rank in range(3)])
    books = [plan.slots["w"].state["codebook"] for plan in world.plans]
    assert books[0].any() and all(book.tobytes() == books[0].tobytes() for book in books)
    assert not books[0][:8].any(), "the zero codeword moved"
    fixed, learned = (payload.nbytes(parse(each).layout(spec)) for each in ("vq", "vq(codebook='learned', refresh=8)"))
    assert learned - fixed == 256 // 8 * 8 * 2


@ALL
def test_of_equally_near_codewords_the_lowest_is_taken(backend: str) -> None:
    ops, array = BACKENDS[backend]
    book = np.array([[0, 4], [4, 0], [4, 0], [-4, 0]], np.float32)
    x = np.array([[4, 4], [4, 0], [0, -1], [-3, -3]], np.float32)
    bias = (book * book).sum(axis=1) / 2
    rows = np.tile(x, (5000, 1))  # more than one chunk
    got = np.asarray(ops.best_rows(array(rows), array(book), array(bias)))
    assert got.reshape(-1, 4)[[0, -1]].tolist() == [[0, 1, 1, 3]] * 2
    assert (got.reshape(-1, 4) == got[:4]).all()


def test_vq_beats_sign_on_heavy_tails_at_the_same_size() -> None:
    x = heavy(1 << 15)
    error = {spec: np.linalg.norm(sent(parse(spec), x) - x) for spec in ("vq", "sign")}
    assert error["vq"] < 0.85 * error["sign"]


# -- the same everywhere ------------------------------------------------------------------------------------------

SAME = ("log(bits=8)", "qsgd", "qsgd(levels=5, block=7)", "ternary", "natural", "randomk(ratio=0.1, shared=False)",
        "blocktopk(ratio=0.1, block=7)", "topk(ratio=0.1)", "topk(ratio=0.02, threshold='sampled')",
        "topk(ratio=0.02, threshold='statistical')", "vq", "vq(dim=3, codewords=16, codebook='learned', block=100)")


@OTHERS
@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("spec", SAME)
def test_same_bytes_in_every_framework(spec: str, error_feedback: bool, backend: str) -> None:
    """TensorFlow: traced, where its optimizer rewrites divisions by constants if it can see them."""
    ops, array = BACKENDS[backend]
    codec, n = parse(spec), 10_001
    layout = codec.layout(TensorSpec("tensor", (n,)))

    def pack(ops: Ops, x: Array) -> Array:
        ctx = context(codec, n, ops=ops, step=3, rank=1, error_feedback=error_feedback)
        return payload.pack(ops, codec.encode(x, ctx), layout)

    run = tf.function(lambda x: pack(ops, x)) if backend == "tensorflow" else lambda x: pack(ops, x)
    denormals = heavy(n)
    denormals[::3] = -1e-40
    for name, x in {"heavy": heavy(n), "denormals": denormals, "zeros": np.zeros(n, np.float32),
                    "huge": np.clip(heavy(n) * 1e37, -3e38, 3e38).astype(np.float32)}.items():
        different = np.flatnonzero(pack(NUMPY, x) != np.asarray(run(array(x))))
        assert not different.size, f"{name}: bytes {different[:5]} differ"


@ALL
def test_root_and_log(backend: str) -> None:
    ops, array = BACKENDS[backend]
    x = np.geomspace(2.0**-99, 2.0**120, 5000).astype(np.float32)
    assert np.allclose(np.asarray(exact.root(ops, array(x))), np.sqrt(x.astype(np.float64)), rtol=3e-7)
    assert np.allclose(np.asarray(exact.log(ops, array(x))), np.log(x.astype(np.float64)), rtol=3e-7, atol=1e-6)


def test_five_ternary_digits_to_a_byte_and_no_byte_out_of_range() -> None:
    from hvd_gradcomp.ops import bits

    digits = np.array(np.meshgrid(*[[0, 1, 2]] * 5), np.int32).T.reshape(-1)
    assert bits.pack_trits(NUMPY, digits).size == 243
    assert np.array_equal(bits.unpack_trits(NUMPY, bits.pack_trits(NUMPY, digits), digits.size), digits)
    assert bits.unpack_trits(NUMPY, np.arange(256, dtype=np.uint8), 1280).max() == 2
