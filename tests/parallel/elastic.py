"""A program for test_elastic.py: 2 ranks become 3, one is killed, 2 go on. Every step checks that nothing is lost."""

import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp.exchange.two_stage import OWNER, bounds

FOLDER = Path(sys.argv[1])
KILLED = FOLDER / "killed.pt"


def worth(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """What this rank keeps counts so much in the mean gradient."""
    total = state["residual"].double() / hvd.size()
    begin, end = bounds(total.numel(), hvd.size())[hvd.rank()]
    total[begin:end] += state[OWNER][: end - begin]
    return total.view(24, 24)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(24, 24))})
    compression = gradcomp.Compression({0: "uniform(bits=2)", 4: "topk(ratio=0.02) + uniform(bits=8)"},
                                       model.named_parameters(), min_size=0, exchange="two_stage")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0),
                                         named_parameters=model.named_parameters(), compression=compression)
    nothing = torch.zeros(24, 24, dtype=torch.float64)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, step=0, given=nothing,
                                   lost=nothing, counted=False, worlds=[])
    share = nothing  # what this rank kept at the last commit

    @hvd.elastic.run
    def train(state):
        nonlocal share
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
                os.kill(os.getpid(), signal.SIGKILL)
            if phase == 3 and since >= 6:
                return
            grad = torch.randn(24, 24, generator=torch.Generator().manual_seed(100 * state.step + hvd.rank()))
            optimizer.zero_grad()
            (model["w"] * grad).sum().backward()
            optimizer.step()
            state.given = state.given + hvd.allreduce(grad.double(), name="given")
            state.step += 1
            kept = worth(compression.plan.slots["w"].state)
            # The weights are the negative sum of all outputs.
            want = state.given - state.lost + model["w"].detach().double()
            torch.testing.assert_close(hvd.allreduce(kept, op=hvd.Sum, name="kept"), want, rtol=0, atol=1e-4)
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
