"""Checkpoints of a Compression: written by all ranks together, whole or not at all, read by any number of ranks.

:func:`save` writes a folder with one file per rank, or one file with what all ranks hold. Either way
the last step is the atomic replacement of one small or only file: whatever happens before (a crash,
a full disk), the old checkpoint stays whole. :func:`load` checks everything on every rank before any
rank changes anything.

Files are numpy ``.npz`` archives of plain arrays, and JSON: nothing in them is ever executed, and
their checksums show damage.
"""

from __future__ import annotations

import io
import json
import os
import uuid
import zipfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np

from hvd_gradcomp import state
from hvd_gradcomp.errors import GradcompError, StateError
from hvd_gradcomp.plan import Plan

MANIFEST = "gradcomp.json"
_DAMAGE = (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, TypeError, NotImplementedError)
_Result = TypeVar("_Result")


class Saveable(Protocol):
    """What a checkpoint asks of a Compression."""

    def plan_for(self, saved: state.Saved) -> Plan:
        """The plan, with all its state arrays, that ``saved`` is to fit."""

    @property
    def world(self) -> tuple[int, int]:
        """``(rank, ranks)`` of those that reduce together."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: state.Saved) -> None: ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's bytes in rank order."""


def save(path: str | Path, compression: Saveable, *, one_file: bool = False) -> None:
    """Save what all ranks hold; call it on every rank, between two steps.

    Args:
        path: seen by all ranks. A folder, in which every rank writes a file of its own; or, with
            ``one_file``, a file that rank 0 writes (every rank then holds all ranks' state in memory).

    Raises:
        StateError: on every rank, if one could not write; it names the rank. The old checkpoint stays.
    """
    target = Path(path)
    rank, _ = compression.world
    if one_file:
        everyone = compression.gather_bytes(dumps(compression.state_dict()))
        blobs = {f"rank{i}": np.frombuffer(blob, np.uint8) for i, blob in enumerate(everyone)}
        _on_all_ranks(compression, lambda: _write(target, lambda file: _npz(file, blobs)) if rank == 0 else None)
        return
    # Files of this save have names of their own: ranks that end in the middle of one never mix two saves.
    name = compression.gather_bytes(uuid.uuid4().hex[:12].encode())[0].decode()
    _on_all_ranks(compression, lambda: _write_shard(target, name, compression))
    _on_all_ranks(compression, lambda: _publish(target, name, compression) if rank == 0 else None)


def load(path: str | Path, compression: Saveable) -> None:
    """Restore what :func:`save` wrote; call it on every rank, between two steps.

    With as many ranks as saved, each gets its own state back. With another number, each starts with
    the mean over the old ranks of the residuals, and takes over what is shared (:mod:`hvd_gradcomp.state`).

    Raises:
        StateError: on every rank, before anything is changed, if on any rank a file is missing,
            damaged, foreign, or of another configuration; it names the rank and the file.
    """
    found = _on_all_ranks(compression, lambda: _read(Path(path), compression))
    compression.load_state_dict(found)


def dumps(saved: state.Saved) -> bytes:
    """A state_dict as the bytes of an ``.npz`` archive."""
    buffer = io.BytesIO()
    _savez(buffer, saved)
    return buffer.getvalue()


def loads(data: bytes, where: str = "these bytes") -> dict[str, Any]:
    """The way back from :func:`dumps`. Raises StateError if ``data`` is damaged or something else."""
    return _loadz(io.BytesIO(data), where)


# -- one state_dict -------------------------------------------------------------------------------


def _savez(file: IO[bytes], saved: state.Saved) -> None:
    arrays = [(name, key, state.as_numpy(array)) for name, each in saved[state.TENSORS].items()
              for key, array in each.items()]
    rest = {key: value for key, value in saved.items() if key != state.TENSORS}
    meta = json.dumps({"state": rest, "arrays": [row[:2] for row in arrays]}).encode()
    numbered = {f"array{i}": row[2] for i, row in enumerate(arrays)}
    _npz(file, {"meta": np.frombuffer(meta, np.uint8), **numbered})


def _npz(file: IO[bytes], arrays: dict[str, Any]) -> None:
    np.savez(file, **arrays)


def _loadz(file: IO[bytes] | Path, where: str) -> dict[str, Any]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            meta = json.loads(archive["meta"].tobytes())
            saved: dict[str, Any] = {**meta["state"], state.TENSORS: {}}
            for i, (name, key) in enumerate(meta["arrays"]):
                saved[state.TENSORS].setdefault(name, {})[key] = archive[f"array{i}"]
            return saved
    except FileNotFoundError:
        raise StateError(f"{where} is missing") from None
    except _DAMAGE as error:
        raise StateError(f"{where} is truncated, damaged, or no state of hvd_gradcomp ({error})") from None


# -- files ----------------------------------------------------------------------------------------


def _write(file: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file so that under its name there is the old content or all of the new one."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _write_shard(folder: Path, name: str, compression: Saveable) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    saved = compression.state_dict()
    _write(folder / _shard(name, *compression.world), lambda file: _savez(file, saved))


def _publish(folder: Path, name: str, compression: Saveable) -> None:
    """Make the shards of this save the checkpoint, then remove older ones and what crashes left behind."""
    ranks = compression.world[1]
    meta = json.dumps({"format": state.FORMAT, "name": name, "ranks": ranks})
    _write(folder / MANIFEST, lambda file: file.write(meta.encode()))
    for old in [*folder.glob("state-*.npz*"), *folder.glob(f"{MANIFEST}.*.tmp")]:
        if not old.name.startswith(f"state-{name}-"):
            old.unlink(missing_ok=True)


def _shard(name: str, rank: int, ranks: int) -> str:
    return f"state-{name}-rank{rank}-of-{ranks}.npz"


def _read(path: Path, compression: Saveable) -> dict[str, Any]:
    """What this rank is to load, checked against its plan."""
    rank, ranks = compression.world
    saved_ranks, shard = _open(path)
    try:
        found = shard(rank if saved_ranks == ranks else 0)
        plan = compression.plan_for(found)
        if saved_ranks != ranks:
            found = state.resized(chain([found], map(shard, range(1, saved_ranks))), plan, rank)
        state.check(found, plan, rank, ranks)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None
    return found


def _open(path: Path) -> tuple[int, Callable[[int], dict[str, Any]]]:
    """How many ranks a checkpoint is of, and what reads one rank's state."""
    if path.is_dir():
        manifest = path / MANIFEST
        try:
            meta = json.loads(manifest.read_text())
            name, ranks = str(meta["name"]), int(meta["ranks"])
        except FileNotFoundError:
            raise StateError(f"{path} holds no checkpoint: {MANIFEST} is missing") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{manifest} is damaged, or of something else ({error})") from None
        files = [path / _shard(name, rank, ranks) for rank in range(ranks)]
        return ranks, lambda rank: _loadz(files[rank], str(files[rank]))
    try:
        with np.load(path, allow_pickle=False) as archive:
            blobs = [archive[f"rank{rank}"].tobytes() for rank in range(len(archive.files))]
    except FileNotFoundError:
        raise StateError(f"{path} is missing") from None
    except _DAMAGE as error:
        raise StateError(f"{path} is truncated, damaged, or no checkpoint of hvd_gradcomp ({error})") from None
    return len(blobs), lambda rank: loads(blobs[rank], f"rank {rank} in {path}")


# -- all ranks ------------------------------------------------------------------------------------


def _on_all_ranks(compression: Saveable, act: Callable[[], _Result]) -> _Result:
    """Do something on every rank. If it fails on one, all raise the StateError that names it."""
    result: list[_Result] = []
    failed = ""
    try:
        result.append(act())
    except (GradcompError, OSError) as error:
        failed = str(error)
    everyone = compression.gather_bytes(b"-" + failed.encode())
    failures = [f"rank {rank}: {text[1:].decode()}" for rank, text in enumerate(everyone) if len(text) > 1]
    if failures:
        raise StateError("\n  ".join([f"the checkpoint failed on {len(failures)} of {len(everyone)} ranks", *failures]))
    return result[0]
