"""One launch for each framework, transport and world size; the tests run inside the ranks."""

import pytest

from tests.parallel.launch import run_tests

WORLDS = [pytest.param(ranks, transport, marks=getattr(pytest.mark, f"np{ranks}"), id=f"np{ranks}-{transport}")
          for ranks in (2, 3) for transport in ("gloo", "mpi")]


ENVIRONMENT = {"tf_keras": {"TF_USE_LEGACY_KERAS": "1"}}


@pytest.mark.parametrize(("ranks", "transport"), WORLDS)
@pytest.mark.parametrize("folder", ["pytorch", "tf", "tf_keras"])
def test_ranks(folder: str, ranks: int, transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    passed = run_tests(folder, ranks, transport, timeout=1500, env=ENVIRONMENT.get(folder))
    with capsys.disabled():
        print(f"\n  {folder}, {ranks} ranks, {transport}: {passed} tests passed on every rank", flush=True)
