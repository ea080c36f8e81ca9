"""One launch for each framework, transport and world size; the tests run inside the ranks."""

import pytest

from tests.parallel.launch import run_tests

WORLDS = [(2, "gloo"), (2, "mpi"), (3, "gloo"), (3, "mpi")]
FOLDERS = {"pytorch": WORLDS, "tf": WORLDS, "tf_keras": WORLDS, "mpi": [(2, "mpirun"), (3, "mpirun")],
           "keras3": [(2, "mpi"), (3, "gloo")],
           # the other worlds of these are in the folders above
           "keras3/test_fit.py": [(2, "gloo")], "keras3/test_dgc.py": [(1, "gloo")],
           "pytorch/test_dgc.py": [(1, "gloo"), (4, "mpi")],
           # two hosts of two
           "pytorch/test_exchange.py": [(4, "gloo"), (4, "mpi")], "tf/test_exchange.py": [(4, "mpi")],
           "mpi/test_allreduce.py": [(4, "mpirun")]}
ENVIRONMENT = {"tf_keras": {"TF_USE_LEGACY_KERAS": "1"}}


@pytest.mark.parametrize(("folder", "ranks", "transport"), [
    pytest.param(folder, ranks, transport, marks=getattr(pytest.mark, f"np{ranks}"),
                 id=f"{folder}-np{ranks}-{transport}")
    for folder, worlds in FOLDERS.items() for ranks, transport in worlds])
def test_ranks(folder: str, ranks: int, transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed = run_tests(folder, ranks, transport, timeout=1500, env=ENVIRONMENT.get(folder))
    with capsys.disabled():
        print(f"\n  {folder}, {ranks} ranks, {transport}: {passed} tests passed on every rank", flush=True)
