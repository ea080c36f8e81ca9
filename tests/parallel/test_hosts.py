"""Where the process sets of ``exchange="hierarchical"`` come from, without HOROVOD_DYNAMIC_PROCESS_SETS."""

import sys

import pytest

from hvd_gradcomp.collectives.process_sets import host_process_sets
from hvd_gradcomp.errors import UsageError
from tests.parallel.launch import horovodrun

STATIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "0"}


@pytest.mark.np4
@pytest.mark.parametrize(("sets", "says"), [
    ("made", "mean {-1.5} by hierarchical(local=2)"),
    ("none", "init(process_sets=hvd_gradcomp.torch.host_process_sets")])
def test_sets_are_made_before_init_or_asked_for(sets: str, says: str) -> None:
    run = horovodrun(4, "gloo", [sys.executable, "-m", "tests.parallel.hosts", sets], timeout=120, env=STATIC)
    assert run.returncode == 0, run.stdout[-3000:]
    assert run.stdout.count(says) == 4, run.stdout[-3000:]


def test_the_groups_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [each.ranks for each in host_process_sets(local=3, ranks=6)]
    assert sets == [[0, 1, 2], [3, 4, 5], [0, 3], [1, 4], [2, 5]]
    assert host_process_sets(local=1, ranks=4) == host_process_sets(local=4, ranks=4) == []
    with pytest.raises(UsageError, match="5 ranks are no hosts of 2 each"):
        host_process_sets(local=2, ranks=5)
    for name in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="not started by horovodrun"):
        host_process_sets(local=2)
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "2")
    assert [each.ranks for each in host_process_sets()] == [[0, 1], [2, 3], [0, 2], [1, 3]]
