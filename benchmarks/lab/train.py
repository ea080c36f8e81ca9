"""What each host runs: training to a target accuracy, PyTorch or TensorFlow. Started by the laboratory with mpirun.

A perceptron with two hidden layers of 1,024 (1.9 million parameters, 7.5 MB of gradients) on the digits of the
examples: much to send for little to compute, the case that a slow network hurts. Evaluation is not in the times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import cases
import data
import net

WIDTH, LR, MOMENTUM, BATCH = 1024, 0.05, 0.9, 32
EVERY = 5
"""Steps from one look at the accuracy to the next."""
Batch = data.Digits
Step = Callable[[Batch], None]
Model = tuple[Step, Callable[[], float], Any]
"""A training step, the accuracy on the test digits, and the Compression (None for stock Horovod)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=["torch", "tensorflow"], required=True)
    parser.add_argument("--codecs", nargs="+", required=True)
    parser.add_argument("--target", type=float, default=0.92, help="accuracy (default: 0.92)")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each codec (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    make = _torch if args.framework == "torch" else _tensorflow
    hvd = _horovod(args.framework)
    hvd.init()
    train, test = data.load()
    train = data.shard(train, hvd.rank(), hvd.size())
    rows = []
    for spec in args.codecs:
        row = run(hvd, make(hvd, spec, test, args.seed), train, args)
        rows.append({"framework": args.framework, "codec": spec, "target": args.target, **row})
        if hvd.rank() == 0:
            print(rows[-1], flush=True)
    if hvd.rank() == 0:
        args.json.write_text(json.dumps(rows))
    hvd.broadcast_object(None, root_rank=0)  # nobody leaves before the last one is done


def run(hvd: Any, model: Model, train: data.Digits, args: argparse.Namespace) -> dict[str, Any]:
    """Train until the target is reached or the time is over."""
    step, accuracy, compression = model
    times: list[float] = []
    reached, now = False, accuracy()
    order = _batches(train, args.seed)
    first = next(order)
    began = time.perf_counter()
    step(first)  # tracing, residuals, and the ranks' agreement: not a step like the others, yet it trains
    warm = time.perf_counter() - began
    before = net.counters() if hvd.size() > 1 else {"rx": 0, "tx": 0}
    evaluating = {"rx": 0, "tx": 0}
    while not reached and sum(times) < args.limit:
        for _ in range(EVERY):
            batch = next(order)
            began = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - began)
        at = net.counters() if hvd.size() > 1 else before
        # All ranks go on or stop together: rank 0 decides.
        now, spent = hvd.broadcast_object((accuracy(), times), root_rank=0)
        times = list(spent)
        reached = now >= args.target
        after = net.counters() if hvd.size() > 1 else before
        evaluating = {name: evaluating[name] + after[name] - at[name] for name in at}
    after = net.counters() if hvd.size() > 1 else before
    received = (after["rx"] - before["rx"] - evaluating["rx"]) / len(times)
    stats = compression.stats() if compression else None
    return {"ranks": hvd.size(), "reached": reached, "steps": len(times) + 1, "accuracy": now, "first_step": warm,
            "step_seconds": statistics.median(times), "seconds": sum(times), "counted_rx": received,
            "expected": stats["wire_bytes_received"] / stats["steps"] if stats and stats["steps"] else None}


def _batches(train: data.Digits, seed: int) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from data.batches(train, BATCH, seed, epoch)
        epoch += 1


def _horovod(framework: str) -> Any:
    if framework == "torch":
        import horovod.torch as hvd
    else:
        import horovod.tensorflow as hvd
    return hvd


def _torch(hvd: Any, spec: str, test: data.Digits, seed: int) -> Model:
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    import hvd_gradcomp.torch as gradcomp

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    pixels = data.SIDE * data.SIDE
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
                          nn.Linear(WIDTH, data.CLASSES))
    named = list(model.named_parameters())
    own = None if spec in cases.DENSE else gradcomp.Compression(spec, named)
    stock = hvd.Compression.fp16 if spec == cases.FP16 else hvd.Compression.none
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=own or stock)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        cross_entropy(model(torch.from_numpy(batch.images)), torch.from_numpy(batch.labels)).backward()
        optimizer.step()

    @torch.no_grad()
    def accuracy() -> float:
        right = model(torch.from_numpy(test.images)).argmax(1) == torch.from_numpy(test.labels)
        return float(right.float().mean())

    return step, accuracy, own


def _tensorflow(hvd: Any, spec: str, test: data.Digits, seed: int) -> Model:
    import keras
    import tensorflow as tf
    from keras import layers

    import hvd_gradcomp.tensorflow as gradcomp

    if not tf.config.threading.get_intra_op_parallelism_threads():
        tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((data.SIDE, data.SIDE)), layers.Flatten(),
                              layers.Dense(WIDTH, activation="relu"), layers.Dense(WIDTH, activation="relu"),
                              layers.Dense(data.CLASSES)])
    variables = model.trainable_variables
    sgd = keras.optimizers.SGD(LR, momentum=MOMENTUM)
    sgd.build(variables)
    hvd.broadcast_variables([v.value for v in model.variables + sgd.variables], root_rank=0)
    own = None if spec in cases.DENSE else gradcomp.Compression(spec, variables=variables)
    stock = hvd.Compression.fp16 if spec == cases.FP16 else hvd.Compression.none
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def compiled(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        if own is None:  # Horovod takes TensorFlow's variables; Keras 3 keeps one inside each of its own
            tape = hvd.DistributedGradientTape(tape, compression=stock)
            gradients = tape.gradient(loss, [v.value for v in variables])
        else:
            gradients = gradcomp.DistributedGradientTape(tape, compression=own).gradient(loss, variables)
        sgd.apply(gradients, variables)

    def step(batch: Batch) -> None:
        compiled(tf.constant(batch.images), tf.constant(batch.labels))

    def accuracy() -> float:
        right = tf.argmax(model(tf.constant(test.images), training=False), 1) == tf.constant(test.labels)
        return float(tf.reduce_mean(tf.cast(right, "float32")))

    return step, accuracy, own


if __name__ == "__main__":
    main()
