"""``verify=True`` on real ranks: bytes that change on their way are an error that names their rank."""

import pytest
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.collectives import hvd_torch
from hvd_gradcomp.errors import DisagreementError, PayloadError

from .world import World, randn

SHAPES = {"a": (40, 30), "b": (100,)}
CARRIED = [("uniform(bits=8)", "gather"), ("powersgd(rank=2)", "gather"), ("sign", "two_stage"),
           ("topk(ratio=0.1)", "sparse_split")]


def grads(step):
    return {name: randn(*shape, seed=step) for name, shape in SHAPES.items()}


class Corrupting(hvd_torch._Collective):
    """One bit of what this rank sends is another one."""

    def __init__(self, tensor, how, *args):
        if how in ("gather", "all_to_all"):
            tensor = tensor.clone()
            tensor[3] ^= 8
        super().__init__(tensor, how, *args)


@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_a_flipped_bit_is_an_error_that_names_the_rank(hvd, spec, exchange, monkeypatch):
    world = World(spec, SHAPES, exchange=exchange, verify=True)
    world.reduce(grads(0))
    before = world.states()
    last = hvd.size() - 1
    if hvd.rank() == last:
        monkeypatch.setattr(hvd_torch, "_Collective", Corrupting)
    # Or else a rank may find it in backward, or be in the second round already, for which its peers never come.
    monkeypatch.setattr(hvd_torch, "poll", lambda running: None)
    world.backward(grads(1))
    # of an all-to-all's bytes only the rank that they were for can say that they are wrong
    if exchange == "gather" or hvd.rank() == 0:
        with pytest.raises(PayloadError, match=rf"the bytes from rank {last} \(of {last + 1}"):
            world.optimizer.synchronize()
        assert all(torch.equal(array, before[name]) for name, array in world.states().items())


@pytest.mark.parametrize(("spec", "exchange"), CARRIED)
def test_the_same_bits_as_without(hvd, spec, exchange):
    plain, verified = (World(spec, SHAPES, exchange=exchange, verify=verify) for verify in (False, True))
    for step in range(3):
        one, other = plain.reduce(grads(step)), verified.reduce(grads(step))
        assert all(torch.equal(one[name], other[name]) for name in SHAPES)
    counts = [world.compression.stats()["wire_bytes_received"] for world in (plain, verified)]
    assert 0 < counts[1] - counts[0] <= 3 * 2 * 4 * 3 * hvd.size()


def test_it_must_be_alike_and_changes_no_state(hvd):
    """A checkpoint made with it is loaded without it."""
    verified, plain = World("sign", SHAPES, verify=True), World("sign", SHAPES)
    verified.reduce(grads(0))
    plain.compression.load_state_dict(verified.compression.state_dict())
    with pytest.raises(DisagreementError, match="verify is"):
        World("sign", SHAPES, verify=hvd.rank() == 0).backward(grads(0))


def test_the_optimizers_take_it(hvd):
    for make in (lambda sgd, named: gradcomp.DistributedOptimizer(sgd, named, "sign", min_size=0, verify=True),
                 lambda sgd, named: gradcomp.DGCOptimizer(sgd, named, 0.1, min_size=0, verify=True)):
        param = torch.nn.Parameter(torch.zeros(50))
        optimizer = make(torch.optim.SGD([param], lr=0.1), [("w", param)])
        assert optimizer.compression.plan.verify
        param.sum().backward()
        optimizer.step()
