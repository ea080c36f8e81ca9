"""Uncompressed gradients in dtypes that Horovod can carry."""

from __future__ import annotations

import tensorflow as tf

from hvd_gradcomp.tensorflow.engine import Bound, live


def widen(x: tf.Tensor) -> tf.Tensor:
    """bfloat16 as float32, complex numbers as pairs along a new last axis, the rest as it is."""
    if x.dtype.is_complex:
        return tf.stack([tf.math.real(x), tf.math.imag(x)], -1)
    return tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x


def narrow(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The way back from :func:`widen`."""
    return tf.complex(x[..., 0], x[..., 1]) if dtype.is_complex else tf.cast(x, dtype)


def pack(bound: Bound, x: tf.Tensor) -> tf.Tensor:
    """:func:`widen` as a vector."""
    return live(bound, tf.reshape(widen(x), (-1,)))


def unpack(bound: Bound, x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The way back from :func:`pack`, to the variable's shape."""
    shape = bound.slot.spec.shape
    return narrow(tf.reshape(x, (*shape, 2) if dtype.is_complex else shape), dtype)
