"""Checkpoints: whole or not at all, one clear error on every rank, nothing changed by it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_gradcomp import checkpoint, state
from hvd_gradcomp.errors import StateError
from hvd_gradcomp.plan import Plan
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.spec import TensorSpec

ROOT = Path(__file__).resolve().parents[2]


class World:
    """Ranks as threads, which meet where real ones exchange bytes."""

    def __init__(self, ranks: int, spec: str = "powersgd(rank=1)", shape: tuple[int, ...] = (6, 5),
                 filled: float = 0.0) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.box: list[bytes] = [b""] * ranks
        self.ranks = [Rank(self, rank, ranks, spec, shape) for rank in range(ranks)]
        for each in self.ranks:
            for array in each.arrays.values():
                array[:] = filled * (each.world[0] + 1)
            each.arrays["factor"][:] = filled

    def all(self, act: Callable[[Rank], Any]) -> list[Any]:
        """Run on every rank at once; what it returned or raised."""
        def caught(rank: Rank) -> Any:
            try:
                return act(rank)
            except StateError as error:
                return error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(caught, self.ranks))

    def save(self, path: Path, **options: Any) -> list[Any]:
        return self.all(lambda rank: checkpoint.save(path, rank, **options))

    def load(self, path: Path) -> list[Any]:
        return self.all(lambda rank: checkpoint.load(path, rank))

    def residuals(self) -> list[float]:
        return [float(rank.arrays["residual"][0]) for rank in self.ranks]


class Rank:
    """The part of a Compression that a checkpoint uses."""

    def __init__(self, world: World, rank: int, ranks: int, spec: str, shape: tuple[int, ...]) -> None:
        self._world, self.world = world, (rank, ranks)
        self.plan = Plan.make([TensorSpec("w", shape)], Policy.make(spec, 0), ranks=ranks)
        self.plan.allocate(self.plan.slots["w"], lambda name, length, dtype: np.zeros(length, dtype))
        self.arrays = self.plan.slots["w"].state

    def state_dict(self) -> dict[str, Any]:
        return state.save(self.plan, *self.world, np.copy)

    def plan_for(self, saved: state.Saved) -> Plan:
        return self.plan

    def load_state_dict(self, state_dict: state.Saved) -> None:
        state.restore(state_dict, self.plan, *self.world, np.copyto)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self._world.box[self.world[0]] = data
        self._world.barrier.wait()
        everyone = list(self._world.box)
        self._world.barrier.wait()
        return everyone


@pytest.fixture(params=[False, True], ids=["one file per rank", "one file"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of 3 ranks with residuals 1, 2 and 3."""
    path = tmp_path / "checkpoint"
    assert World(3, filled=1.0).save(path, one_file=request.param) == [None] * 3
    return path


@pytest.mark.parametrize(("ranks", "residuals"), [(3, [1, 2, 3]), (2, [2, 2]), (1, [2]), (4, [2, 2, 2, 2])])
def test_every_world_size_can_load(saved: Path, ranks: int, residuals: list[float]) -> None:
    world = World(ranks)
    assert world.load(saved) == [None] * ranks
    assert world.residuals() == residuals
    assert all((rank.arrays["factor"] == 1.0).all() for rank in world.ranks)


def refused(world: World, path: Path, *says: str) -> None:
    """Every rank raises the same StateError, and nothing has changed."""
    before = [rank.state_dict() for rank in world.ranks]
    errors = world.load(path)
    assert all(isinstance(error, StateError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    for text in says:
        assert text in str(errors[0])
    for rank, old in zip(world.ranks, before, strict=True):
        assert checkpoint.dumps(rank.state_dict()) == checkpoint.dumps(old)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_missing_shard(tmp_path: Path, ranks: int) -> None:
    World(3, filled=1.0).save(tmp_path)
    next(tmp_path.glob("*rank1-of-3.npz")).unlink()
    refused(World(ranks, filled=9.0), tmp_path, "rank1-of-3.npz is missing", "rank 1: ")


@pytest.mark.parametrize("keep", [0, 10, 0.5, -1])
def test_a_truncated_file(saved: Path, keep: float) -> None:
    file = saved if saved.is_file() else next(saved.glob("*rank2-of-3.npz"))
    data = file.read_bytes()
    file.write_bytes(data[:int(keep * len(data)) if isinstance(keep, float) else keep])
    refused(World(3, filled=9.0), saved, "rank 2: ", "truncated, damaged")


def test_flipped_bits(saved: Path) -> None:
    file = saved if saved.is_file() else next(saved.glob("*rank0-of-3.npz"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    refused(World(3, filled=9.0), saved, "rank 0: ", "damaged")


@pytest.mark.parametrize(("options", "says"), [
    ({"spec": "powersgd(rank=2)"}, "codec is 'powersgd(rank=1)', not 'powersgd(rank=2)'"),
    ({"shape": (5, 6)}, "shape of tensor 'w' is")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_another_plan(saved: Path, ranks: int, options: dict[str, Any], says: str) -> None:
    world = World(ranks, filled=9.0, **options)
    refused(world, saved, "another configuration", f"rank {ranks - 1}: ")


def test_nothing_there(tmp_path: Path) -> None:
    refused(World(2), tmp_path / "nowhere", "nowhere is missing")
    refused(World(2), tmp_path, "holds no checkpoint: gradcomp.json is missing")


def test_foreign_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", weights=np.ones(3))
    refused(World(2), tmp_path / "other.npz", "no checkpoint of hvd_gradcomp")
    (tmp_path / "text").write_text("hello")
    refused(World(2), tmp_path / "text", "no checkpoint of hvd_gradcomp")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / checkpoint.MANIFEST).write_text("[1]")
    refused(World(2), tmp_path / "folder", "is damaged, or of something else")


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", rank0=np.array([print], dtype=object))
    refused(World(1), tmp_path / "evil.npz", "no checkpoint of hvd_gradcomp")


def test_another_shape_or_dtype_of_an_array() -> None:
    rank = World(1).ranks[0]
    for array, says in ((np.zeros(7, np.float32), r"residual of tensor 'w' is float32\[7\], not float32\[30\]"),
                        (np.zeros(30), r"is float64\[30\], not float32\[30\]")):
        wrong = rank.state_dict()
        wrong["tensors"]["w"]["residual"] = array
        with pytest.raises(StateError, match=says):
            rank.load_state_dict(wrong)
    wrong = rank.state_dict()
    del wrong["tensors"]["w"]["factor"]
    with pytest.raises(StateError, match=r"tensor 'w': saved .*expected .*factor"):
        rank.load_state_dict(wrong)
    with pytest.raises(StateError, match="format 1; this version reads format 2"):
        rank.load_state_dict({**rank.state_dict(), "format": 1})


def test_resizing_wants_every_rank_once() -> None:
    states = [rank.state_dict() for rank in World(3).ranks]
    plan = World(2).ranks[0].plan
    with pytest.raises(StateError, match="that of rank 1 is missing"):
        state.resized([states[0], states[2]], plan, 0)
    with pytest.raises(StateError, match=r"got those of ranks \[0, 1, 2, 2\]"):
        state.resized([*states, states[2]], plan, 0)
    with pytest.raises(StateError, match="of 3 and of 2 ranks"):
        state.resized([states[0], World(2).ranks[1].state_dict()], plan, 0)
    with pytest.raises(StateError, match="no state"):
        state.resized([], plan, 0)


def test_a_rank_that_cannot_write_fails_all_and_the_old_checkpoint_stays(
        saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_file = saved.is_file()
    real = checkpoint.os.replace

    def full(source: Path, target: Path) -> None:
        if one_file or "rank1-" in Path(target).name:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", full)
    errors = World(3, filled=5.0).save(saved, one_file=one_file)
    assert all("No space left" in str(error) and f"rank {0 if one_file else 1}: " in str(error) for error in errors)
    monkeypatch.undo()
    world = World(3)
    world.load(saved)
    assert world.residuals() == [1, 2, 3]
    assert not list(saved.parent.rglob("*.tmp"))


CRASH = """
import os, signal, sys
from pathlib import Path
import hvd_gradcomp.checkpoint as checkpoint
from tests.unit.test_checkpoint import World
real, calls = os.replace, []
def replace(source, target):
    calls.append(target)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
checkpoint.os.replace = replace
World(1, filled=5.0).save(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_while_saving_leaves_the_old_checkpoint(tmp_path: Path, number: int) -> None:
    """Killed just before its state, or the manifest that names it, takes its place."""
    World(1, filled=1.0).save(tmp_path)
    run = subprocess.run([sys.executable, "-c", CRASH,
                          str(tmp_path), str(number)], cwd=ROOT, timeout=60)
    assert run.returncode == -9
    world = World(1)
    assert world.load(tmp_path) == [None] and world.residuals() == [1]
    assert len(list(tmp_path.iterdir())) > 2, "something of the crashed save is left"
    world.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "and the next save removes it"


def test_saving_again_replaces(saved: Path) -> None:
    world = World(2, filled=7.0)
    world.save(saved, one_file=saved.is_file())
    assert saved.is_file() or len(list(saved.iterdir())) == 3
    other = World(2)
    other.load(saved)
    assert other.residuals() == [7, 14]
