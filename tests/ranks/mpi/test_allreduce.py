"""``hvd_gradcomp.mpi``: the mean arrives, the ranks agree, nothing hangs."""

import sys

import numpy as np
import pytest

from hvd_gradcomp.collectives import mpi
from hvd_gradcomp.errors import DisagreementError, PayloadError, SpecError, StateError, UsageError
from hvd_gradcomp.exchange import EXCHANGES
from hvd_gradcomp.exchange.two_stage import OWNER, bounds
from hvd_gradcomp.mpi import Compression

CARRIED = [("fp16", "sum"), ("powersgd(rank=2)", "sum"), ("uniform(bits=8)", "gather"), ("sign", "two_stage"),
           ("uniform(bits=3, block=64, stochastic=True)", "two_stage"), ("topk(ratio=0.05)", "sparse_split"),
           ("topk(ratio=0.1) + uniform(bits=8)", "sparse_split"), ("none", "auto")]


def normal(seed, rank, shape):
    return np.random.default_rng((seed, rank)).normal(size=shape).astype(np.float32)


def kept(comm, compression, name):
    """Mean over the ranks of all that is kept, in float64."""
    slot = compression.plan.slots[name]
    mine = np.zeros(slot.spec.numel)
    if "residual" in slot.state:
        mine += slot.state["residual"]
    if OWNER in slot.state:
        start, stop = bounds(slot.spec.numel, comm.size)[comm.rank]
        mine[start:stop] += comm.size * slot.state[OWNER][: stop - start]
    return sum(comm.allgather(mine)).reshape(slot.spec.shape) / comm.size


def assert_equal_on_ranks(comm, array):
    everyone = comm.allgather(array.tobytes())
    assert len(set(everyone)) == 1, "ranks got different bits"


def test_every_exchange_is_tried():
    assert {exchange for _, exchange in CARRIED} >= set(EXCHANGES)


@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_nothing_is_lost_and_ranks_agree(comm, spec, exchange):
    compression = Compression(comm, spec, exchange=exchange, min_size=0)
    shapes = {"matrix": (57, 31), "odd": (1025,), "tiny": (2,)}
    received = {name: np.zeros(shape) for name, shape in shapes.items()}
    for step in range(4):
        for name, shape in shapes.items():
            out = compression.allreduce(normal(step, comm.rank, shape), name=name)
            assert_equal_on_ranks(comm, out)
            received[name] += out
    for name, shape in shapes.items():
        want = sum(normal(step, rank, shape).astype(float) for step in range(4) for rank in range(comm.size))
        tolerance = 1e-2 if spec == "fp16" else 1e-4  # halves round when they are added
        np.testing.assert_allclose(received[name] + kept(comm, compression, name), want / comm.size, atol=tolerance)
    compression.free()


@pytest.mark.parametrize("spec", ["sign", "fp16", "topk(ratio=0.05)"])
def test_hosts_lose_nothing_and_agree(comm, spec):
    """Declared hosts of two ranks. With two ranks there is one, and with three there are none."""
    compression = Compression(comm, spec, exchange="hierarchical(local=2)", min_size=0)
    if comm.size == 3:
        with pytest.raises(SpecError, match="3 ranks are no hosts of 2 each"):
            compression.allreduce(normal(0, comm.rank, (300,)), name="x")
        return
    received = np.zeros((57, 31))
    for step in range(3):
        out = compression.allreduce(normal(step, comm.rank, (57, 31)), name="x")
        assert_equal_on_ranks(comm, out)
        received += out
    want = sum(normal(step, rank, (57, 31)).astype(float) for step in range(3) for rank in range(comm.size))
    tolerance = 1e-2 if spec == "fp16" else 1e-4
    np.testing.assert_allclose(received + kept(comm, compression, "x"), want / comm.size, atol=tolerance)
    if comm.size > 2:
        assert compression.stats()["tensors"]["x"]["exchange"] == "hierarchical(local=2)"
    compression.free()


def test_the_hosts_of_this_machine(comm):
    compression = Compression(comm, "sign", exchange="hierarchical", min_size=0)
    compression.allreduce(normal(0, comm.rank, (300,)), name="x")
    assert compression.plan.exchange == f"hierarchical(local={comm.size})"
    assert compression.stats()["tensors"]["x"]["exchange"] == "gather"
    compression.free()


def test_waits_in_any_order(comm):
    """Rounds of one array must not wait for those of another."""
    compression = Compression(comm, {"a*": "topk(ratio=0.1)", "*": "uniform(bits=8)"}, exchange="two_stage", min_size=0)
    names = [f"{letter}{i}" for letter in "abc" for i in range(5)]
    rng = np.random.default_rng(comm.rank)
    for step in range(20):
        order = names if step == 0 else rng.permutation(names).tolist()
        requests = {name: compression.iallreduce(normal(step, comm.rank, (100,)), name=name) for name in order}
        for name in rng.permutation(names).tolist():
            out = requests[name].wait()
            assert requests[name].wait() is out and requests[name].test()
    assert compression.stats()["steps"] == 20


def test_mean_and_sum_in_every_dtype(comm):
    for spec in ("none", "uniform(bits=8)"):
        compression = Compression(comm, spec, min_size=0)
        for dtype in (np.float16, np.float32, np.float64):
            array = np.full((3, 4), comm.rank + 1.0, dtype)
            for op, want in (("mean", (comm.size + 1) / 2), ("sum", comm.size * (comm.size + 1) / 2)):
                out = compression.allreduce(array, name=f"{dtype.__name__} {op}", op=op)
                assert out.dtype == dtype and (out == want).all()
            assert (array == comm.rank + 1).all()


def test_small_arrays_are_reduced_as_they_are(comm):
    compression = Compression(comm, "sign")
    array = normal(0, comm.rank, (100,)).astype(np.float64)
    want = sum(normal(0, rank, (100,)).astype(np.float64) for rank in range(comm.size)) / comm.size
    np.testing.assert_allclose(compression.allreduce(array, name="x"), want, rtol=1e-12)
    entry = compression.stats()["tensors"]["x"]
    assert entry["codec"] is None and "small" in entry["reason"]


def test_sub_communicators(comm):
    """The last rank is alone: it keeps its own."""
    part = comm.Split(color=comm.rank == comm.size - 1, key=comm.rank)
    compression = Compression(part, "uniform(bits=8)", exchange="two_stage", min_size=0)
    out = compression.allreduce(np.full(64, float(comm.rank), np.float32), name="x")
    np.testing.assert_allclose(out, np.mean(part.allgather(comm.rank)), rtol=1e-6)
    assert compression.stats()["ranks"] == part.size
    assert compression.stats()["steps"] == (part.size > 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_voids_the_reduction_everywhere(comm, bad):
    for spec in ("none", "topk(ratio=0.5)"):
        compression = Compression(comm, spec, min_size=0, exchange="auto")
        compression.allreduce(normal(0, comm.rank, (50,)), name="x")
        before = {key: array.copy() for key, array in compression.plan.slots["x"].state.items()}
        array = normal(1, comm.rank, (50,))
        array[7] = bad if comm.rank == comm.size - 1 else array[7]
        assert np.isnan(compression.allreduce(array, name="x")).all()
        for key, old in before.items():
            np.testing.assert_array_equal(compression.plan.slots["x"].state[key], old)
        assert np.isfinite(compression.allreduce(normal(2, comm.rank, (50,)), name="x")).all()


@pytest.mark.parametrize(("change", "says"), [
    ({"compression": "uniform(bits=4)"}, "codec is 'uniform(bits=4)', not 'uniform(bits=8)'"),
    ({"seed": 1}, "seed is 1, not 0"), ({"exchange": "gather"}, "exchange is 'gather', not 'auto'")])
def test_disagreement_names_rank_and_difference(comm, change, says):
    last = comm.rank == comm.size - 1
    compression = Compression(comm, **({"compression": "uniform(bits=8)", "min_size": 0} | (change if last else {})))
    with pytest.raises(DisagreementError) as error:
        compression.allreduce(np.ones(64), name="x")
    assert f"rank {comm.size - 1}: {says}" in str(error.value)


@pytest.mark.parametrize(("name", "shape"), [("y", (64,)), ("x", (65,))])
def test_another_name_or_shape_is_a_disagreement(comm, name, shape):
    compression = Compression(comm, "sign", min_size=0)
    given = ("x", (64,)) if comm.rank else (name, shape)
    with pytest.raises(DisagreementError, match=r"tensor '[xy]'"):
        compression.allreduce(np.ones(given[1]), name=given[0])


def test_another_shape_later_is_an_error_on_every_rank(comm):
    compression = Compression(comm, "topk(ratio=0.1)", exchange="two_stage", min_size=0)
    compression.allreduce(normal(0, comm.rank, (64,)), name="x")
    before = compression.plan.slots["x"].state["residual"].copy()
    with pytest.raises(UsageError, match="'x'") as error:
        compression.allreduce(normal(1, comm.rank, (64,) if comm.rank else (8, 8)), name="x")
    assert ("float32[8, 8] on rank 0" in str(error.value)) == (comm.rank == 0)
    np.testing.assert_array_equal(compression.plan.slots["x"].state["residual"], before)
    assert_equal_on_ranks(comm, compression.allreduce(normal(2, comm.rank, (64,)), name="x"))


def test_bad_arguments(comm):
    compression = Compression(comm, "sign", min_size=0)
    with pytest.raises(UsageError, match="op must be 'mean' or 'sum', not 'max'"):
        compression.allreduce(np.ones(4), name="x", op="max")
    with pytest.raises(UsageError, match="int64: arrays must be float16, float32, float64"):
        compression.allreduce(np.ones(4, np.int64), name="whole")
    request = compression.iallreduce(np.ones(4), name="x")
    with pytest.raises(UsageError, match="still being reduced"):
        compression.iallreduce(np.ones(4), name="x")
    with pytest.raises(UsageError, match="still being reduced"):
        compression.free()
    request.wait()
    with pytest.raises(UsageError, match="intracommunicator"):
        Compression(None, "sign")


@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_restored_state_goes_on_bit_for_bit(comm, spec, exchange):
    first = Compression(comm, spec, exchange=exchange, min_size=0)
    for step in range(2):
        first.allreduce(normal(step, comm.rank, (40, 30)), name="x")
    second = Compression(comm, spec, exchange=exchange, min_size=0)
    second.load_state_dict(first.state_dict())
    for step in range(2, 4):
        one, other = (each.allreduce(normal(step, comm.rank, (40, 30)), name="x") for each in (first, second))
        assert one.tobytes() == other.tobytes()


def test_state_that_does_not_fit_changes_nothing(comm):
    compression = Compression(comm, "topk(ratio=0.1)", min_size=0)
    compression.allreduce(normal(0, comm.rank, (64,)), name="x")
    saved = compression.state_dict()
    for wrong, says in (({}, "not what"), (saved | {"rank": saved["rank"] + 1}, "this is rank"),
                        (Compression(comm, "sign", min_size=0).state_dict(), "another configuration")):
        with pytest.raises(StateError, match=says):
            compression.load_state_dict(wrong)
    after = compression.state_dict()["tensors"]["x"]["residual"]
    np.testing.assert_array_equal(after, saved["tensors"]["x"]["residual"])


def test_bytes_follow_the_formula(comm):
    compression = Compression(comm, "uniform(bits=8)", exchange="two_stage")
    for step in range(2):
        compression.allreduce(normal(step, comm.rank, (1 << 16,)), name="x")
    shown, share = compression.stats(), (comm.size - 1) / comm.size
    assert shown["tensors"]["x"]["exchange"] == "two_stage"
    assert 2 * share < shown["wire_bytes_received"] / 2 / (1 << 16) < 2.05 * share


def test_no_framework_is_imported():
    assert not {"horovod", "torch", "tensorflow"} & set(sys.modules)


@pytest.mark.parametrize(("spec", "exchange"), [("uniform(bits=8)", "gather"), ("powersgd(rank=2)", "gather")])
def test_verify_names_the_rank_whose_bytes_are_wrong(comm, spec, exchange, monkeypatch):
    plain, verified = (Compression(comm, spec, exchange=exchange, min_size=0, verify=verify)
                       for verify in (False, True))
    for step in range(2):
        one, other = (each.allreduce(normal(step, comm.rank, (40, 30)), name="x") for each in (plain, verified))
        assert one.tobytes() == other.tobytes()
    before, last = verified.state_dict()["tensors"]["x"], comm.size - 1
    combine = mpi.OpenExchange._combine

    def corrupted(self, part, how, comm):
        part = part.copy()
        part[3] ^= 8
        return combine(self, part, how, comm)

    if comm.rank == last:
        monkeypatch.setattr(mpi.OpenExchange, "_combine", corrupted)
    with pytest.raises(PayloadError, match=rf"the bytes from rank {last} \(of {comm.size}"):
        verified.allreduce(normal(3, comm.rank, (40, 30)), name="x")
    after = verified.state_dict()["tensors"]["x"]
    assert all(after[key].tobytes() == array.tobytes() for key, array in before.items())
