"""One launch for each framework, transport and world size; the tests run inside the ranks."""

import pytest

from tests.parallel.launch import run_tests

FOLDERS = {"pytorch": ("gloo", "mpi"), "tf": ("gloo", "mpi"), "tf_keras": ("gloo", "mpi"), "mpi": ("mpirun",)}
WORLDS = [pytest.param(folder, ranks, transport, marks=getattr(pytest.mark, f"np{ranks}"),
                       id=f"{folder}-np{ranks}-{transport}")
          for folder, transports in FOLDERS.items() for ranks in (2, 3) for transport in transports]

ENVIRONMENT = {"tf_keras": {"TF_USE_LEGACY_KERAS": "1"}}


@pytest.mark.parametrize(("folder", "ranks", "transport"), WORLDS)
def test_ranks(folder: str, ranks: int, transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed = run_tests(folder, ranks, transport, timeout=1500, env=ENVIRONMENT.get(folder))
    with capsys.disabled():
        print(f"\n  {folder}, {ranks} ranks, {transport}: {passed} tests passed on every rank", flush=True)
