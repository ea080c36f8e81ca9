"""A program for test_elastic.py: 2 ranks become 3, one is killed, 2 go on. Every step checks that nothing is lost.

The second argument is ``sgd`` or ``dgc``, whose momentum is checked too.
"""

import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.exchange.two_stage import OWNER, bounds

FOLDER = Path(sys.argv[1])
KILLED = FOLDER / "killed.pt"
MOMENTUM = 0.5 if sys.argv[2] == "dgc" else 0.0


def worth(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """What this rank keeps counts so much in the mean gradient."""
    total = state["residual"].double() / hvd.size()
    begin, end = bounds(total.numel(), hvd.size())[hvd.rank()]
    total[begin:end] += state[OWNER][: end - begin]
    return total.view(24, 24)


def velocity(state: dict[str, torch.Tensor], was: int) -> torch.Tensor:
    """This rank's momentum as the next step will find it; ``was``: ranks of the last step here, 0 if there was none."""
    u = state.get("momentum", torch.zeros(24 * 24)).double()
    if set(hvd.allgather(torch.tensor([was]), name="was").tolist()) != {hvd.size()}:
        u = hvd.allreduce(u / max(was, 1), op=hvd.Sum, name="velocity")  # everyone gets the same share
    return u.view(24, 24)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(24, 24))})
    named = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    if MOMENTUM:
        optimizer = gradcomp.DGCOptimizer(sgd, named, 0.02, warmup_steps=0, min_size=0, exchange="two_stage")
    else:
        optimizer = gradcomp.DistributedOptimizer(sgd, named, {0: "uniform(bits=2)", 4: "topk(ratio=0.02)"},
                                                  min_size=0, exchange="two_stage")
    compression = optimizer.compression
    nothing = torch.zeros(24, 24, dtype=torch.float64)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, step=0, given=nothing,
                                   lost=nothing, counted=False, worlds=[])
    share = nothing  # what this rank kept at the last commit
    was = 0

    @hvd.elastic.run
    def train(state):
        nonlocal share, was
        if not state.worlds or state.worlds[-1][0] != hvd.size():
            state.worlds = [*state.worlds, (hvd.size(), state.step)]
        if KILLED.exists() and not state.counted:
            state.lost, state.counted = state.lost + torch.load(KILLED), True
        while True:
            phase, since = len(state.worlds), state.step - state.worlds[-1][1]
            if phase == 1 and since == 3 and hvd.rank() == 0:
                (FOLDER / "hosts").write_text("localhost:2\n127.0.0.1:1\n")
            if phase == 2 and since == 7 and hvd.local_size() == 1:
                torch.save(share, KILLED)
                time.sleep(1)  # as in faulty.py
                os.kill(os.getpid(), signal.SIGKILL)
            if phase == 3 and since >= 6:
                return
            grad = torch.randn(24, 24, generator=torch.Generator().manual_seed(100 * state.step + hvd.rank()))
            given = MOMENTUM * velocity(compression.plan.slots["w"].state, was) + grad.double()
            optimizer.zero_grad()
            (model["w"] * grad).sum().backward()
            optimizer.step()
            was = hvd.size()
            state.given = state.given + hvd.allreduce(given, name="given")
            state.step += 1
            kept = worth(compression.plan.slots["w"].state)
            # The weights are the negative sum of all outputs.
            want = state.given - state.lost + model["w"].detach().double()
            torch.testing.assert_close(hvd.allreduce(kept, op=hvd.Sum, name="kept"), want, rtol=0, atol=1e-4)
            if not MOMENTUM:
                assert int(compression.plan.slots["w"].state["step"]) == state.step
            if state.step % 3 == 0:
                share = kept
                state.commit()

    train(state)
    everyone = hvd.allgather(model["w"].detach().unsqueeze(0), name="weights")
    assert all(torch.equal(everyone[0], each) for each in everyone)
    assert float(state.lost.abs().max()) > 0.1, "the dead rank had kept nothing, so nothing was tested"
    if hvd.rank() == 0:
        (FOLDER / "done").write_text(repr([size for size, _ in state.worlds]))


if __name__ == "__main__":
    main()
