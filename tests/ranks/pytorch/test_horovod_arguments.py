"""What stock Horovod's optimizer can be told is honoured under compression."""

import pytest
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.errors import DisagreementError, ProcessSetError, UsageError

from .world import LOSSY, World, assert_equal_on_ranks, mean_over_ranks, randn

SHAPE = (40, 30)


@pytest.mark.parametrize("spec", LOSSY)
def test_gradient_predivide_factor_changes_nothing(hvd, spec):
    plain = World(spec, {"w": SHAPE}).reduce({"w": randn(*SHAPE, seed=1)})["w"]
    divided = World(spec, {"w": SHAPE}, horovod={"gradient_predivide_factor": 3.0}).reduce(
        {"w": randn(*SHAPE, seed=1)})["w"]
    torch.testing.assert_close(divided, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spec", ["none", "uniform(bits=8)", "topk(ratio=0.1)"])
def test_local_passes_are_summed_and_the_codec_runs_once(hvd, spec):
    """Case J3."""
    world = World(spec, {"w": (8,)}, horovod={"backward_passes_per_step": 2})
    world.optimizer.zero_grad()
    for _ in range(2):
        world.backward({"w": torch.ones(8)})
    world.optimizer.synchronize()
    out = world.params["w"].grad.double() + world.residual("w")
    torch.testing.assert_close(out, torch.full((8,), 2.0, dtype=torch.float64))
    assert world.compression.stats()["steps"] == 1


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_keep_equal_shapes_apart(hvd, groups):
    """Case F5."""
    names = ["a", "b", "c", "d"]
    world = World("uniform(bits=8)", {name: SHAPE for name in names}, horovod={"groups": groups})
    out = world.reduce({name: torch.full(SHAPE, float(i + 1)) for i, name in enumerate(names)})
    for i, name in enumerate(names):
        torch.testing.assert_close(out[name], torch.full(SHAPE, float(i + 1)))


def test_small_tensors_in_a_group_with_compressed_ones(hvd):
    world = World("topk(ratio=0.1)", {"big": SHAPE, "small": (3,)}, min_size=100, horovod={"groups": 1})
    out = world.reduce({"big": torch.ones(SHAPE), "small": torch.tensor([1.0, 2.0, 3.0]) * (hvd.rank() + 1)})
    torch.testing.assert_close(out["small"], torch.tensor([1.0, 2.0, 3.0]) * (hvd.size() + 1) / 2)


@pytest.mark.parametrize("spec", ["uniform(bits=8)", "topk(ratio=0.02)", "sign"])
def test_unused_branches_of_one_shape_are_not_swapped(hvd, spec):
    """Case I2: rank 0 uses only A, the others only B."""
    world = World(spec, {"a": SHAPE, "b": SHAPE})
    outs = {name: torch.zeros(SHAPE, dtype=torch.float64) for name in "ab"}
    used = "a" if hvd.rank() == 0 else "b"
    for step in range(4):
        out = world.reduce({used: randn(*SHAPE, seed=step)})
        for name in "ab":
            assert_equal_on_ranks(out[name])
            outs[name] += out[name].double()
    for name in "ab":
        def grad(rank, name=name):
            mine = "a" if rank == 0 else "b"
            return sum(randn(*SHAPE, seed=step, rank=rank) for step in range(4)) * float(name == mine)
        torch.testing.assert_close(outs[name] + world.residual(name), mean_over_ranks(grad), rtol=0, atol=1e-5)


def test_parameter_unused_on_all_ranks(hvd):
    world = World("topk(ratio=0.01)", {"used": SHAPE, "unused": SHAPE})
    out = world.reduce({"used": torch.ones(SHAPE)})
    assert torch.equal(out["unused"], torch.zeros(SHAPE))
    assert torch.equal(world.compression.plan.slots["unused"].state["residual"], torch.zeros(1200))


def test_synchronize_clip_step(hvd):
    """Case J1: one reduction, and the clipped gradient is what moves the weights."""
    world = World("uniform(bits=8)", {"w": (2,)})
    world.optimizer.zero_grad()
    world.backward({"w": torch.tensor([3.0, 4.0])})
    world.optimizer.synchronize()
    before = world.states()
    torch.nn.utils.clip_grad_norm_(world.params.values(), 1.0)
    with world.optimizer.skip_synchronize():
        world.optimizer.step()
    torch.testing.assert_close(world.params["w"].detach(), torch.tensor([-0.6, -0.8]), rtol=1e-4, atol=1e-4)
    assert world.compression.stats()["steps"] == 1
    assert all(torch.equal(array, before[name]) for name, array in world.states().items())


@pytest.mark.parametrize("spec", ["none", "topk(ratio=0.1)"])
def test_sparse_gradients_go_horovods_own_way(hvd, spec):
    """Cases A3, F2, F4: duplicates are added, averaged over ranks, and reported as not compressed."""
    embedding = torch.nn.Embedding(50, 8, sparse=True)
    dense = torch.nn.Linear(8, 30)
    named = [("embedding", embedding.weight), *[(f"dense.{n}", p) for n, p in dense.named_parameters()]]
    compression = gradcomp.Compression(spec, named, min_size=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named_parameters=named,
                                         compression=compression)
    optimizer.zero_grad()
    rows = torch.tensor([7, 7, hvd.rank()])
    embedding(rows).sum().backward()
    optimizer.synchronize()
    out = embedding.weight.grad.to_dense()
    want = mean_over_ranks(lambda rank: torch.nn.functional.one_hot(torch.tensor([7, 7, rank]), 50).sum(0).float()
                           .view(50, 1).expand(50, 8))
    torch.testing.assert_close(out.double(), want)
    entry = compression.stats()["tensors"]["embedding"]
    if spec != "none":
        assert entry["codec"] is None and "sparse" in entry["reason"]


def test_sparse_as_dense_is_compressed(hvd):
    embedding = torch.nn.Embedding(50, 8, sparse=True)
    named = [("embedding", embedding.weight)]
    compression = gradcomp.Compression("uniform(bits=8)", named, min_size=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), named_parameters=named,
                                         compression=compression, sparse_as_dense=True)
    optimizer.zero_grad()
    embedding(torch.tensor([hvd.rank(), 7])).sum().backward()
    optimizer.synchronize()
    out = embedding.weight.grad.to_dense()
    torch.testing.assert_close(out[7], torch.ones(8), rtol=0, atol=0.01)
    torch.testing.assert_close(out[0], torch.full((8,), 1 / hvd.size()), rtol=0, atol=0.01)
    assert compression.stats()["tensors"]["embedding"]["codec"] == "uniform(bits=8)"


def test_adasum_is_refused(hvd):
    param = torch.nn.Parameter(torch.zeros(10))
    with pytest.raises(UsageError, match="Average"):
        gradcomp.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("w", param)], "sign", op=hvd.Adasum)


def test_unbound_gradient_is_an_error(hvd):
    bound, other = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([bound, other], lr=1.0), named_parameters=[("bound", bound), ("other", other)],
        compression=gradcomp.Compression("sign", [("bound", bound)], min_size=0))
    with pytest.raises(UsageError, match="named_parameters"):
        other.sum().backward()
    del optimizer


def test_disagreement_names_rank_and_difference(hvd):
    param = torch.nn.Parameter(torch.zeros(64))
    spec = "uniform(bits=4)" if hvd.rank() == hvd.size() - 1 else "uniform(bits=8)"
    compression = gradcomp.Compression(spec, [("w", param)], min_size=0)
    hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), named_parameters=[("w", param)],
                             compression=compression)
    with pytest.raises(DisagreementError) as error:
        param.sum().backward()
    # with two ranks there is no majority: rank 0 is taken as the standard
    assert f"rank {hvd.size() - 1}: codec is 'uniform(bits=4)', not 'uniform(bits=8)'" in str(error.value)


def test_another_dtype_is_a_disagreement(hvd):
    """Case I7."""
    dtype = torch.float16 if hvd.rank() == hvd.size() - 1 else torch.float32
    world = World("sign", {"w": torch.zeros(64, dtype=dtype)})
    with pytest.raises(DisagreementError, match="dtype of tensor 'w' is float16, not float32"):
        world.backward({"w": torch.ones(64, dtype=dtype)})


def test_another_parameter_list_is_a_disagreement(hvd):
    names = ["a", "b"] if hvd.rank() == 0 else ["a", "c"]
    params = [(name, torch.nn.Parameter(torch.zeros(64))) for name in names]
    compression = gradcomp.Compression("sign", params, min_size=0)
    hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in params], lr=1.0), named_parameters=params,
                             compression=compression)
    with pytest.raises(DisagreementError, match=r"tensor 'b' is|tensor 'c' is"):
        params[0][1].sum().backward()


def test_another_version_is_a_disagreement(hvd, monkeypatch):
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setattr("hvd_gradcomp.plan.__version__", "0.0.1")
    world = World("sign", {"w": (64,)})
    with pytest.raises(DisagreementError, match=rf"rank {hvd.size() - 1}: version is '0.0.1', not '\d"):
        world.backward({"w": torch.ones(64)})


def test_two_optimizers_in_turn(hvd):
    """A GAN: two optimizers and Compressions of their own, whose steps alternate, each at its own pace."""
    first, second = World("topk(ratio=0.1)", {"w": SHAPE}), World("powersgd(rank=1)", {"w": SHAPE, "v": (50,)})
    totals = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in (("f", SHAPE), ("s", SHAPE))}
    for step in range(6):
        totals["f"] += first.reduce({"w": randn(*SHAPE, seed=step)})["w"].double()
        if step % 2:
            out = second.reduce({"w": randn(*SHAPE, seed=50 + step), "v": torch.ones(50)})
            assert_equal_on_ranks(out["w"])
            totals["s"] += out["w"].double()
    assert (first.compression.stats()["steps"], second.compression.stats()["steps"]) == (6, 3)
    for world, total, seeds in ((first, totals["f"], range(6)), (second, totals["s"], (51, 53, 55))):
        want = mean_over_ranks(lambda rank, seeds=seeds: sum(randn(*SHAPE, seed=s, rank=rank) for s in seeds))
        torch.testing.assert_close(total + world.residual("w"), want, rtol=0, atol=1e-4)


def test_process_set_given_to_one_side_only_is_an_error(hvd):
    """Horovod reduces over all ranks, the Compression over a set of its own rank only."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    param = torch.nn.Parameter(torch.zeros(64))
    compression = gradcomp.Compression("sign", [("w", param)], min_size=0, process_set=sets[hvd.rank()])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), named_parameters=[("w", param)],
                                         compression=compression)
    param.sum().backward()
    with pytest.raises(ProcessSetError, match="process_set"):
        optimizer.synchronize()
    for process_set in sets:
        hvd.remove_process_set(process_set)


def test_process_set_given_to_both_sides(hvd):
    """Case I8: the set is all ranks but the last, which is not blocked."""
    members = list(range(hvd.size() - 1))
    process_set = hvd.add_process_set(members)
    if hvd.rank() in members:
        world = World("uniform(bits=8)", {"w": (64,)}, process_set=process_set, horovod={"process_set": process_set})
        out = world.reduce({"w": torch.full((64,), float(hvd.rank()))})["w"]
        torch.testing.assert_close(out, torch.full((64,), sum(members) / len(members)))
        assert world.compression.stats()["ranks"] == len(members)
    hvd.barrier()  # removing a set while its members still use it would block them
    hvd.remove_process_set(process_set)


def test_two_compressions_in_one_process(hvd):
    """A GAN: equal names, one backward pass through both."""
    first, second = World("sign", {"w": SHAPE}), World("sign", {"w": SHAPE})
    (first.params["w"].sum() + (second.params["w"] * 2.0).sum()).backward()
    first.optimizer.synchronize()
    second.optimizer.synchronize()
    assert torch.equal(first.params["w"].grad, torch.ones(SHAPE))
    assert torch.equal(second.params["w"].grad, torch.full(SHAPE, 2.0))


def test_adasum_is_refused_by_the_stock_optimizer_too(hvd):
    """Adasum compresses parameter updates, not gradients: recognized by what Horovod hands over."""
    param = torch.nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), named_parameters=[("w", param)],
                                         op=hvd.Adasum, compression=gradcomp.Compression("sign", [("w", param)]))
    with pytest.raises(UsageError, match="Adasum"):
        param.sum().backward()
    del optimizer
