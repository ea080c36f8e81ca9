"""Horovod's TensorFlow ops as a transport.

A flow is run once, while its graph is traced: every send leaves a Horovod op in the graph, and no
Python is left at run time. The ops carry names of our own (``ignore_name_scope``), because Horovod
pairs the ranks' ops by name and TensorFlow's names depend on the graph around them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_gradcomp import require
from hvd_gradcomp.exchange.base import Commit, Flow
from hvd_gradcomp.ops.base import Array

hvd: Any = require.horovod("horovod.tensorflow")


def gather_bytes(data: bytes, process_set: Any, name: str) -> list[bytes]:
    """Everyone's bytes in rank order, exchanged at once even while a graph is traced."""
    with tf.init_scope():
        return list(hvd.allgather_object(data, name=name, process_set=process_set))


def run(flow: Flow, name: str, process_set: Any, verdict: Array) -> Array:
    """Trace a flow to its end: ops named ``<name>.<round>.<part>``, the verdict for its commit."""
    answer: Any = None
    number = 0
    while True:
        try:
            request = flow.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(request, Commit):
            answer = verdict
            continue
        answer = {part: _combine(array, request.how, f"{name}.{number}.{part}", process_set)
                  for part, array in request.parts.items()}
        number += 1


def allreduce(x: Array, op: Any, name: str, process_set: Any, predivide: float = 1.0) -> Array:
    """Horovod's all-reduce. ``predivide`` splits the division of ``op=Average`` as Horovod's
    ``gradient_predivide_factor`` does."""
    return hvd._allreduce(x, name=name, op=op, prescale_factor=1.0 / predivide, postscale_factor=predivide,
                          ignore_name_scope=True, process_set=process_set)


def allgather(x: Array, name: str, process_set: Any) -> Array:
    """Join along the first axis, in rank order."""
    return hvd.allgather(x, name=name, ignore_name_scope=True, process_set=process_set)


def _combine(x: Array, how: str, name: str, process_set: Any) -> Array:
    ranks = process_set.size()
    if how == "gather":
        return tf.reshape(allgather(x, name, process_set), (ranks, x.shape[0]))
    if how == "all_to_all":
        rows = hvd.alltoall(x, name=name, ignore_name_scope=True, process_set=process_set)
        return tf.reshape(rows, (ranks, x.shape[0] // ranks))
    return allreduce(x, hvd.Sum if how == "sum" else hvd.Max, name, process_set)
