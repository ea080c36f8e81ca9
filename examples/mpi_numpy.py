"""Train a logistic regression with numpy and mpi4py alone, with compressed gradients."""

from __future__ import annotations

import time

import common
import data
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_EPILOG = """\
try:
  mpirun -np 4 --oversubscribe python examples/{name} --compression none
  mpirun -np 4 --oversubscribe python examples/{name} --compression "topk(ratio=0.01)" --exchange sparse_split
"""


def probabilities(weights: Floats, images: Floats) -> Floats:
    """``[n, 10]`` from ``[n, 784]`` and weights ``[785, 10]``, whose last row is the bias."""
    scores = images @ weights[:-1] + weights[-1]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def gradient(weights: Floats, images: Floats, labels: NDArray[np.int64]) -> Floats:
    """Of the mean cross-entropy loss."""
    error = probabilities(weights, images)
    error[np.arange(len(labels)), labels] -= 1
    total = np.concatenate([images.T @ error, error.sum(axis=0, keepdims=True)])
    return (total / len(labels)).astype(np.float32)


def main() -> None:
    args = common.parser(__file__, __doc__ or "", epilog=_EPILOG).parse_args()
    from mpi4py import MPI  # starts MPI, which --help does not need

    from hvd_gradcomp.mpi import Compression

    comm = MPI.COMM_WORLD
    train, test = data.load()
    test_images = test.images.reshape(len(test.labels), -1)
    mine = data.shard(train, comm.rank, comm.size)
    weights = np.zeros((785, data.CLASSES), np.float32)
    velocity = np.zeros_like(weights)
    compression = Compression(comm, args.compression, exchange=args.exchange, min_size=args.min_size)
    result = common.Result.start("numpy + mpi4py", args, comm.size, weights.size)
    began = time.perf_counter()
    for epoch in range(args.epochs):
        for batch in data.batches(mine, args.batch_size, args.seed, epoch):
            grad = gradient(weights, batch.images.reshape(len(batch.labels), -1), batch.labels)
            velocity *= np.float32(0.9)
            velocity += compression.allreduce(grad, name="weights")
            weights -= np.float32(common.learning_rate(args, epoch)) * velocity
        guess = probabilities(weights, test_images)
        loss = -float(np.log(guess[np.arange(len(test.labels)), test.labels] + 1e-9).mean())
        result.epoch_done(loss, float((guess.argmax(axis=1) == test.labels).mean()), compression.stats())
    assert len(set(comm.allgather(weights.tobytes()))) == 1, "the ranks' weights differ"
    if comm.rank == 0:
        result.finish(time.perf_counter() - began, args.json)


if __name__ == "__main__":
    main()
