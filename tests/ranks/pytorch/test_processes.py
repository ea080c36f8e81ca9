"""Several optimizers, process sets, threads and processes around one Horovod."""

import copy
import io
import os
import pickle
import threading

import pytest
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp import parse
from hvd_gradcomp.collectives.local import LocalWorld
from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.policy import Policy
from hvd_gradcomp.schedule import dgc

from .world import World, assert_equal_on_ranks, randn


def weights(*models):
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def test_a_gan(hvd):
    """Two nets, two optimizers, one of them DGC's; each loss goes through both nets."""
    torch.manual_seed(0)
    maker, judge = torch.nn.Linear(8, 16), torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(),
                                                               torch.nn.Linear(32, 1))
    makers = gradcomp.DGCOptimizer(torch.optim.SGD(maker.parameters(), lr=0.05, momentum=0.9),
                                   maker.named_parameters(), 0.1, warmup_steps=4, min_size=0)
    judges = gradcomp.DistributedOptimizer(torch.optim.SGD(judge.parameters(), lr=0.05), judge.named_parameters(),
                                           "powersgd(rank=2)", min_size=0)
    before = weights(maker), weights(judge)
    for step in range(8):
        real, noise = randn(16, 16, seed=step) + 1.0, randn(16, 8, seed=100 + step)
        judges.zero_grad()
        (judge(maker(noise).detach()).mean() - judge(real).mean()).backward()
        judges.step()
        judge.requires_grad_(False)  # or the judge's gradients would be reduced too
        makers.zero_grad()
        (-judge(maker(noise)).mean()).backward()
        makers.step()
        judge.requires_grad_(True)
    assert not torch.equal(weights(maker), before[0]) and not torch.equal(weights(judge), before[1])
    assert_equal_on_ranks(weights(maker, judge))
    assert makers.compression.stats()["steps"] == judges.compression.stats()["steps"] == 8


def test_several_process_sets(hvd):
    """Some parameters are reduced over all ranks, some over all but the last, some over the last alone."""
    last = hvd.size() - 1
    sets = [hvd.global_process_set, hvd.add_process_set(list(range(last))), hvd.add_process_set([last])]
    mine = [each for each in sets if each.included()]
    worlds = [World("topk(ratio=0.1)", {"w": (60,)}, process_set=each, horovod={"process_set": each}) for each in mine]
    sums = [torch.zeros(60) for _ in mine]
    for step in range(4):
        for world, total in zip(worlds, sums, strict=True):
            total += world.reduce({"w": randn(60, seed=step)})["w"]
    for world, each, total in zip(worlds, mine, sums, strict=True):
        kept = hvd.allreduce(world.states()["w/residual"], name=f"kept.{each.ranks}", process_set=each)
        want = sum(randn(60, seed=step, rank=rank) for step in range(4) for rank in each.ranks) / each.size()
        torch.testing.assert_close(total + kept, want, rtol=0, atol=1e-4)
    hvd.barrier()  # removing a set while its members still use it would block them
    for each in sets[1:]:
        hvd.remove_process_set(each)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        return randn(10, seed=i)


def test_data_loader_workers(hvd):
    """They are forked from a process with Horovod's thread and open exchanges."""
    world = World("powersgd(rank=1)", {"w": (10, 10)})
    for batch in torch.utils.data.DataLoader(Numbers(), 8, num_workers=2, multiprocessing_context="fork"):
        world.backward({"w": batch.T @ batch})
        world.optimizer.step()
        world.optimizer.zero_grad()
    assert world.compression.stats()["steps"] == 6
    assert_equal_on_ranks(world.params["w"])


def in_a_fork(act):
    """What ``act`` returns or raises in a forked child; it never leaves by the way that pytest would see."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = act()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "wb") as out:
            pickle.dump(answer, out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        result = pickle.load(answer)
    os.waitpid(child, 0)
    return result


def lockstep():
    """All codecs' kernels in one process, as bytes."""
    world = LocalWorld({"a": "uniform(bits=4)", "b": "topk(ratio=0.1)", "c": "powersgd(rank=2)"},
                       {"a": (300_000,), "b": (300_000,), "c": (30, 40)}, 2, ops=TorchOps())
    grads = [{name: randn(*shape, seed=1, rank=rank) for name, shape in
              {"a": (300_000,), "b": (300_000,), "c": (30, 40)}.items()} for rank in range(2)]
    return [world.step(grads)[0][name].numpy().tobytes() for name in "abc"]


def test_a_fork_after_init(hvd):
    """Codecs and kernels work in it; reducing there says why it cannot. The parent goes on undisturbed."""
    world = World("topk(ratio=0.1)", {"w": (60,)})
    world.reduce({"w": randn(60, seed=0)})
    want = lockstep()
    assert in_a_fork(lockstep) == want
    answer = in_a_fork(lambda: world.backward({"w": randn(60, seed=1)}))
    assert answer.startswith("UsageError: this process was forked"), answer
    assert_equal_on_ranks(world.reduce({"w": randn(60, seed=2)})["w"])


def test_threads(hvd):
    """Codecs and kernels keep nothing between calls."""
    want, results = lockstep(), [None] * 4

    def run(i):
        results[i] = lockstep()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [want] * 4


def test_what_describes_a_compression_is_copied_and_pickled(hvd):
    """Case J5. What is bound to one optimizer is not, and says so."""
    for value in (parse("topk(ratio=0.1) + uniform(bits=8)"), parse("powersgd(rank=2)"), dgc(0.01, warmup_steps=8),
                  Policy.make({"a*": "sign", "*": "topk(ratio=0.1)"}, 10)):
        for twin in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert str(twin) == str(value) and twin == value
    param = torch.nn.Parameter(torch.zeros(50))
    optimizer = gradcomp.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [("w", param)], "sign", min_size=0)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="state_dict"):
            copier(optimizer)
    copy.deepcopy(optimizer.state_dict())
    param.sum().backward()
    optimizer.step()


def test_a_copy_of_the_model_is_not_reduced(hvd):
    """An average of the weights, or a model saved whole: the copy's gradients stay its own."""
    model = torch.nn.Linear(16, 8)
    optimizer = gradcomp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                              "sign", min_size=0)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        twin(torch.ones(4, 16)).sum().backward()
    assert not optimizer._handles and not optimizer.compression.new_gradients
    model(randn(4, 16, seed=1)).sum().backward()
    optimizer.step()
