"""Checkpoints of ``hvd_gradcomp.mpi``: its names are known only once they are used."""

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from hvd_gradcomp import checkpoint
from hvd_gradcomp.errors import StateError, UsageError
from hvd_gradcomp.mpi import Compression

from .test_allreduce import CARRIED, kept, normal

SHAPES = {"matrix": (40, 30), "vector": (257,)}


@pytest.fixture
def folder(comm, tmp_path_factory) -> Path:
    """One that all ranks know."""
    return Path(comm.bcast(str(tmp_path_factory.mktemp("checkpoint")) if comm.rank == 0 else ""))


def reduce(comm, compression, step):
    return {name: compression.allreduce(normal(step, comm.rank, shape), name=name) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("one_file", [False, True])
@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_saved_loaded_and_continued(comm, folder, spec, exchange, one_file):
    """Case K1 (d), bitwise, into a Compression that has reduced nothing yet."""
    straight, resumed = (Compression(comm, spec, exchange=exchange, min_size=0) for _ in range(2))
    for step in range(2):
        reduce(comm, straight, step)
    checkpoint.save(folder / "state", straight, one_file=one_file)
    checkpoint.load(folder / "state", resumed)
    for step in range(2, 4):
        out, want = reduce(comm, resumed, step), reduce(comm, straight, step)
        assert all(out[name].tobytes() == want[name].tobytes() for name in SHAPES)


@pytest.mark.parametrize(("spec", "exchange"), [("topk(ratio=0.05)", "gather"), ("uniform(bits=2)", "two_stage")])
def test_fewer_ranks_go_on_with_the_mean(comm, folder, spec, exchange):
    """Case K1 (c): written by all ranks, read by one less and by all of them: what is kept is the same mean."""
    everyone = Compression(comm, spec, exchange=exchange, min_size=0)
    for step in range(3):
        reduce(comm, everyone, step)
    checkpoint.save(folder, everyone)
    want = {name: kept(comm, everyone, name) for name in SHAPES}
    assert np.abs(want["matrix"]).max() > 0.1
    last = comm.rank == comm.size - 1
    part = comm.Split(color=last, key=comm.rank)
    fewer = Compression(part, spec, exchange=exchange, min_size=0)
    checkpoint.load(folder, fewer)
    for name in SHAPES:
        np.testing.assert_allclose(kept(part, fewer, name), want[name], rtol=1e-6, atol=1e-6)


def test_errors_are_the_same_on_all_ranks_and_change_nothing(comm, folder):
    compression = Compression(comm, "topk(ratio=0.1)", min_size=0)
    reduce(comm, compression, 0)
    checkpoint.save(folder, compression)
    with pytest.raises(StateError, match="another configuration: codec"):
        checkpoint.load(folder, Compression(comm, "sign", min_size=0))
    comm.Barrier()
    last = comm.size - 1
    if comm.rank == last:
        file = next(folder.glob(f"*rank{last}-of-*.npz"))
        os.truncate(file, file.stat().st_size // 2)
    reduce(comm, compression, 1)
    before = checkpoint.dumps(compression.state_dict())
    with pytest.raises(StateError, match=rf"1 of {last + 1} ranks\n  rank {last}: .*is truncated"):
        checkpoint.load(folder, compression)
    assert checkpoint.dumps(compression.state_dict()) == before


def test_a_compression_is_not_copied(comm):
    """Case J5."""
    compression = Compression(comm, "sign", min_size=0)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="state_dict"):
            copier(compression)
