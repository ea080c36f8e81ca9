"""A program for test_elastic.py: 2 ranks become 3, one is killed, 2 go on. Every step checks that nothing is lost."""

import os
import signal
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import hvd_gradcomp.tensorflow as gradcomp
from hvd_gradcomp.exchange.two_stage import OWNER, bounds
from hvd_gradcomp.tensorflow import elastic

FOLDER = Path(sys.argv[1])
KILLED = FOLDER / "killed.npy"


def worth(state):
    """What this rank keeps counts so much in the mean gradient."""
    total = state["residual"].numpy().astype("float64") / hvd.size()
    begin, end = bounds(total.size, hvd.size())[hvd.rank()]
    total[begin:end] += state[OWNER].numpy()[: end - begin]
    return total.reshape(24, 24)


def main() -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    w = tf.Variable(tf.zeros((24, 24)), name="w")
    compression = gradcomp.Compression({0: "uniform(bits=2)", 4: "topk(ratio=0.02) + uniform(bits=8)"}, [w],
                                       min_size=0, exchange="two_stage")
    nothing = np.zeros((24, 24))
    state = elastic.State([w], compression, step=0, given=nothing, lost=nothing, counted=False, worlds=[])
    share = nothing  # what this rank kept at the last commit

    @elastic.run
    def train(state):
        nonlocal share

        @tf.function
        def reduced(grad):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(w * grad)
            return gradcomp.DistributedGradientTape(tape, compression=compression).gradient(loss, w)

        if not state.worlds or state.worlds[-1][0] != hvd.size():
            state.worlds = [*state.worlds, (hvd.size(), state.step)]
        if KILLED.exists() and not state.counted:
            state.lost, state.counted = state.lost + np.load(KILLED), True
        while True:
            phase, since = len(state.worlds), state.step - state.worlds[-1][1]
            if phase == 1 and since == 3 and hvd.rank() == 0:
                (FOLDER / "hosts").write_text("localhost:2\n127.0.0.1:1\n")
            if phase == 2 and since == 4 and hvd.local_size() == 1:
                np.save(KILLED, share)
                time.sleep(1)  # as in faulty.py
                os.kill(os.getpid(), signal.SIGKILL)
            if phase == 3 and since >= 3:
                return
            grad = np.random.RandomState(100 * state.step + hvd.rank()).standard_normal((24, 24)).astype("float32")
            w.assign_sub(reduced(tf.constant(grad)))
            state.given = state.given + hvd.allreduce(grad.astype("float64"), name="given").numpy()
            state.step += 1
            kept = worth(compression.plan.slots["w"].state)
            # The weights are the negative sum of all outputs.
            want = state.given - state.lost + w.numpy()
            np.testing.assert_allclose(hvd.allreduce(kept, op=hvd.Sum, name="kept"), want, rtol=0, atol=1e-4)
            assert int(compression.plan.slots["w"].state["step"][0]) == state.step
            if state.step % 3 == 0:
                share = kept
                state.commit()

    train(state)
    everyone = hvd.allgather_object(w.numpy().tobytes())
    assert len(set(everyone)) == 1
    assert np.abs(state.lost).max() > 0.1, "the dead rank had kept nothing, so nothing was tested"
    if hvd.rank() == 0:
        (FOLDER / "done").write_text(repr([size for size, _ in state.worlds]))


if __name__ == "__main__":
    main()
