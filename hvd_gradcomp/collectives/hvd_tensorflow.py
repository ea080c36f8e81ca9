"""Horovod's TensorFlow ops as a transport.

A flow is run once, while its graph is traced: every send leaves a Horovod op in the graph, and no
Python is left at run time. The ops carry names of our own (``ignore_name_scope``), because Horovod
pairs the ranks' ops by name and TensorFlow's names depend on the graph around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvd_gradcomp import require
from hvd_gradcomp.collectives.process_sets import Sets
from hvd_gradcomp.exchange.base import BUCKET, Commit, Flow
from hvd_gradcomp.ops.base import Array

hvd: Any = require.horovod("horovod.tensorflow")


def gather_bytes(data: bytes, process_set: Any, name: str) -> list[bytes]:
    """Everyone's bytes in rank order, exchanged at once even while a graph is traced."""
    with tf.init_scope():
        return list(hvd.allgather_object(data, name=name, process_set=process_set))


def run(flows: Mapping[str, Flow], sets: Sets, verdict: Array) -> dict[str, Array]:
    """Trace flows to their ends, by name; ops are named ``<name>.<round>.<part>``, the verdict is for all
    commits. Their all-to-alls share messages, so all ranks trace flows of the same names together.

    Args:
        sets: the process set of each group that flows combine over; that of all ranks under None.
    """
    answers: dict[str, Any] = dict.fromkeys(flows)
    results: dict[str, Array] = {}
    number = 0
    while len(results) < len(flows):
        rows: dict[str, Array] = {}
        for name in sorted(flows.keys() - results):
            try:
                request = flows[name].send(answers[name])
            except StopIteration as end:
                results[name] = end.value
                continue
            if isinstance(request, Commit):
                answers[name] = verdict
                continue
            answers[name] = {}
            for part, array, how in request:
                full = f"{name}.{number}.{part}"
                if how == "all_to_all" and request.group is None:
                    rows[full] = array
                    answers[name][part] = full  # until it is there
                else:
                    answers[name][part] = _combine(array, how, full, sets[request.group])
        for each in _buckets(rows):
            received = _all_to_all(each, sets[None])
            for answer in answers.values():
                if isinstance(answer, dict):
                    answer.update({part: received[full] for part, full in answer.items()
                                   if isinstance(full, str) and full in received})
        number += 1
    return results


def allreduce(x: Array, op: Any, name: str, process_set: Any, predivide: float = 1.0) -> Array:
    """Horovod's all-reduce. ``predivide`` splits the division of ``op=Average`` as Horovod's
    ``gradient_predivide_factor`` does."""
    return hvd._allreduce(x, name=name, op=op, prescale_factor=1.0 / predivide, postscale_factor=predivide,
                          ignore_name_scope=True, process_set=process_set)


def allgather(x: Array, name: str, process_set: Any) -> Array:
    """Join along the first axis, in rank order."""
    return hvd.allgather(x, name=name, ignore_name_scope=True, process_set=process_set)


def _combine(x: Array, how: str, name: str, process_set: Any) -> Array:
    if how == "all_to_all":
        return _all_to_all({name: x}, process_set)[name]
    if how == "gather":
        return tf.reshape(allgather(x, name, process_set), (process_set.size(), x.shape[0]))
    return allreduce(x, hvd.Sum if how == "sum" else hvd.Max, name, process_set)


def _buckets(rows: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Neighbors in groups of up to BUCKET bytes; what is larger goes alone."""
    groups: list[dict[str, Array]] = []
    room = 0
    for name, array in rows.items():
        nbytes = int(array.shape[0])
        if nbytes > room:
            groups.append({})
            room = max(BUCKET, nbytes)
        groups[-1][name] = array
        room -= nbytes
    return groups


def _all_to_all(rows: Mapping[str, Array], process_set: Any) -> dict[str, Array]:
    """One message of the rows, uint8 ``[ranks * width]``, of some tensors; ``[ranks, width]`` each."""
    ranks = process_set.size()
    each = [tf.reshape(array, (ranks, array.shape[0] // ranks)) for array in rows.values()]
    joined = tf.concat(each, 1)
    received = hvd.alltoall(tf.reshape(joined, (-1,)), name=next(iter(rows)), ignore_name_scope=True,
                            process_set=process_set)
    split = tf.split(tf.reshape(received, joined.shape), [array.shape[1] for array in each], 1)
    return dict(zip(rows, split, strict=True))
