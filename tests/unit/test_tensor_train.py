"""Tensor train and tensor ring: exact when the rank suffices, better with a higher one."""

from __future__ import annotations

import string
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hvd_gradcomp import parse, payload
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.codecs.tensor_train import modes
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import SpecError
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.ops.tensorflow import TensorflowOps
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.spec import TensorSpec

Floats = NDArray[np.float32]
KINDS = ("tt", "tr")
SHAPES = ((32, 16, 3, 3), (48, 36), (30, 7, 20), (900,), (6, 5, 4, 3, 2))


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sent(spec: str, x: Floats) -> Floats:
    """What arrives of ``x``."""
    codec = parse(spec)
    ctx = Ctx(NumpyOps(), TensorSpec("w", x.shape), 1, 0, 0)
    parts = codec.encode(x.reshape(-1), ctx)
    payload.check(ctx.ops, parts, codec.layout(ctx.spec))
    return codec.decode(parts, np.zeros(x.size, np.float32), ctx).reshape(x.shape)


def ring(dims: tuple[int, ...], rank: int, closing: int, seed: int) -> Floats:
    """A tensor made of random cores; ``closing`` 1 makes a train."""
    ranks = [closing, *[rank] * (len(dims) - 1), closing]
    letters = iter(string.ascii_lowercase)
    bonds = [next(letters) for _ in dims]
    outs = [next(letters) for _ in dims]
    terms = [bonds[i] + outs[i] + bonds[(i + 1) % len(dims)] for i in range(len(dims))]
    cores = [normal(seed + i, ranks[i], d, ranks[i + 1]) for i, d in enumerate(dims)]
    return np.einsum(f"{','.join(terms)}->{''.join(outs)}", *cores).astype(np.float32)


def size(spec: str, shape: tuple[int, ...]) -> int:
    return payload.nbytes(parse(spec).layout(TensorSpec("w", shape)))


@pytest.mark.parametrize("spec", ["tt(rank=0)", "tr(rank=0)", "tt(rank=2.0)", "tr(rank=None)", "tt(rank=True)"])
def test_impossible_ranks_are_errors(spec: str) -> None:
    with pytest.raises(SpecError, match="rank must be"):
        parse(spec)


@pytest.mark.parametrize(("shape", "expected"), [
    ((512, 256, 3, 3), (512, 256, 3, 3)), ((64, 1, 3, 3), (64, 3, 3)), ((4096, 4096), (64, 64, 64, 64)),
    ((48, 36), (6, 8, 6, 6)), ((13, 50), (13, 5, 10)), ((12, 1, 1, 10), (3, 4, 2, 5)), ((900,), (5, 6, 5, 6)),
    ((7,), (3, 3)), ((1,), (1,)), ((), (1,))])
def test_modes(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert modes(shape) == expected


def test_bytes() -> None:
    """The sum of the cores, each rank cut to the sides of its unfolding."""
    assert size("tt(rank=4)", (4096, 4096)) == 4 * (64 * 4 + 2 * 4 * 64 * 4 + 4 * 64)
    assert size("tr(rank=4)", (4096, 4096)) == 4 * (4 * (4 * 64 * 4))
    assert size("tt(rank=8)", (32, 16, 3, 3)) == 4 * (32 * 8 + 8 * 16 * 8 + 8 * 3 * 3 + 3 * 3)
    assert size("tt(rank=100)", (6, 5, 4)) == 4 * 6 * 5 * 4, "dense where cores save nothing"


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_train_is_exact_when_the_rank_suffices(shape: tuple[int, ...]) -> None:
    x = ring(modes(shape), 2, 1, 20).reshape(shape)
    assert size("tt(rank=2)", shape) < 4 * x.size
    assert np.linalg.norm(sent("tt(rank=2)", x) - x) <= 1e-5 * np.linalg.norm(x)
    assert np.linalg.norm(sent("tt(rank=1)", x) - x) > 0.1 * np.linalg.norm(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_full_rank_is_exact(kind: str, shape: tuple[int, ...]) -> None:
    x = normal(21, *shape)
    assert np.abs(sent(f"{kind}(rank=1000)", x) - x).max() <= 1e-5


def test_tensor_ring_is_exact_when_the_rank_suffices() -> None:
    """Cores of a ring of rank 2: the first unfolding has rank 4 (2 x 2), which a train of rank 2 cannot hold."""
    x = ring((16, 12, 10), 2, 2, 22)
    unfolding = np.linalg.matrix_rank(x.reshape(16, -1), tol=1e-4 * np.linalg.norm(x))
    assert unfolding == 4
    scale = float(np.linalg.norm(x))
    assert np.linalg.norm(sent("tr(rank=4)", x) - x) <= 1e-5 * scale
    assert np.linalg.norm(sent("tt(rank=2)", x) - x) > 0.05 * scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power", [1, 5])
def test_error_never_rises_with_the_rank(kind: str, shape: tuple[int, ...], power: int) -> None:
    x = normal(23, *shape) ** power
    norm = float(np.linalg.norm(x))
    errors = [float(np.linalg.norm(sent(f"{kind}(rank={rank})", x) - x)) / norm for rank in range(1, 13)]
    assert errors[0] < 1.0 and errors[-1] < 0.95 * errors[0]
    assert all(after <= before + 1e-6 for before, after in pairwise(errors)), errors


def test_tensor_train_of_two_modes_is_the_truncated_svd() -> None:
    """Both sides are primes, so there is nothing but the matrix."""
    x = normal(24, 37, 29)
    assert np.abs(sent("tt(rank=3)", x) - sent("svd(rank=3)", x)).max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_nothing_is_lost(kind: str, ranks: int) -> None:
    for shape in ((16, 8, 3, 3), (24, 20), (45,)):
        world = LocalWorld(f"{kind}(rank=2)", {"w": shape}, ranks)
        given, received = np.zeros(shape), np.zeros(shape)
        for step in range(4):
            grads = [normal(100 * step + rank, *shape) for rank in range(ranks)]
            outs = [out["w"] for out in world.step([{"w": grad} for grad in grads])]
            assert all(out.tobytes() == outs[0].tobytes() for out in outs)
            given, received = given + np.mean(grads, axis=0), received + outs[0]
            kept = np.mean([plan.slots["w"].state["residual"] for plan in world.plans], axis=0).reshape(shape)
            assert np.abs(received + kept - given).max() <= 2e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (24, 20), (45,)])
def test_frameworks_agree(kind: str, shape: tuple[int, ...]) -> None:
    """To roundings, although the libraries choose other signs for singular vectors."""
    codec, spec, x = parse(f"{kind}(rank=2)"), TensorSpec("w", shape), normal(25, *shape).reshape(-1)
    results = []
    for ops in (NumpyOps(), TorchOps(), TensorflowOps()):
        array = torch.from_numpy(x) if ops.name == "torch" else x
        ctx = Ctx(ops, spec, 1, 0, 0)
        results.append(np.asarray(codec.decode(codec.encode(array, ctx), ops.zeros((x.size,)), ctx)))
    assert max(np.abs(other - results[0]).max() for other in results) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_degenerate_input(kind: str) -> None:
    """Case C1: zeros, constants and what is not finite decompose without an error."""
    assert not sent(f"{kind}(rank=2)", np.zeros((24, 20), np.float32)).any()
    constant = np.full((24, 20), 3.0, np.float32)
    assert np.abs(sent(f"{kind}(rank=2)", constant) - constant).max() <= 1e-5
    x = normal(26, 24, 20)
    x[2, 2], x[3, 3] = np.nan, np.inf
    assert np.isfinite(sent(f"{kind}(rank=2)", x)).all()
