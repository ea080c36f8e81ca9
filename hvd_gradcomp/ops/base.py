"""The closed list of array operations that codecs, memory and exchanges may use.

One subclass per framework (numpy, torch, TensorFlow). Arrays support Python's ``+ - * < <= > >=``
between arrays of one dtype and Python scalars, ``/`` between arrays, ``%`` between int32 that are not
negative, and slicing along the first axis; everything else goes through a method here. What is written
here holds in every framework, bit for bit:

* Rounding is half to even. Division is the IEEE division, never a multiplication by an inverse:
  by a Python number it goes through :meth:`Ops.divide` or :meth:`Ops.scalar` (TensorFlow's graph
  optimizer and torch on CUDA make ``x / 3`` a multiplication; the former also merges ``x * a * b``
  and ``x + a + b`` for constants a and b).
* Denormals are taken as 0 by TensorFlow and kept by the others, and which of 0.0 and -0.0 is the
  smaller one differs: what decides bytes goes through :meth:`Ops.flush`, or works on the bits.
* :meth:`Ops.top_indices`: larger key first, ties to the lowest index, result in ascending order.
* :meth:`Ops.sum_rows` adds in a fixed tree order; no other float sum may decide bytes.
* Scalars are arrays of shape ``(1,)``: 0-d arrays do not travel through all-gather.
* Nothing here branches on array values in traced or device code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# A numpy array, torch tensor or TensorFlow tensor; the operations are typed by their docstrings.
Array = Any

ITEMSIZE = {"float32": 4, "int32": 4, "float16": 2, "int16": 2, "uint8": 1}

ROWS = 8192
"""Rows that :meth:`Ops.best_rows` works on at a time."""


class Ops(ABC):
    """Array operations of one framework. ``dtype`` arguments are the names in :data:`ITEMSIZE`."""

    name: str
    in_place: bool
    """Whether state arrays and accumulators are written where they are (TensorFlow's tensors never change)."""

    # -- the host -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def on_host(self) -> bool:
        """Whether arrays are in the host's memory, where kernels can work on them without a copy."""

    @abstractmethod
    def host(self, function: Callable[[dict[str, Any]], list[Any]], arrays: Mapping[str, Array],
             returns: Sequence[tuple[int, str]]) -> list[Array]:
        """Run ``function`` on named numpy arrays; it returns vectors of the lengths and dtypes ``returns``. It may
        write to what it was given only if ``in_place``."""

    @abstractmethod
    def host_update(self, function: Callable[[dict[str, Any]], None], targets: Mapping[str, Array],
                    arrays: Mapping[str, Array], ok: Array) -> None:
        """Let ``function`` change the state arrays ``targets`` if ``ok`` (``(1,)``, 0 or 1); it is given numpy arrays
        by name: ``targets``, to write to, and ``arrays``."""

    # -- making arrays --------------------------------------------------------------------------

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Array:
        """A new array of zeros."""

    @abstractmethod
    def arange(self, n: int) -> Array:
        """``0 .. n-1`` as int32."""

    @abstractmethod
    def constant(self, values: Any, dtype: str) -> Array:
        """A small constant array from nested Python numbers."""

    def scalar(self, value: float) -> Array:
        """A float32 constant ``(1,)`` that no graph optimizer folds into other arithmetic."""
        return self.constant([value], "float32")

    # -- shape and dtype ------------------------------------------------------------------------

    @abstractmethod
    def reshape(self, x: Array, shape: Sequence[int]) -> Array: ...

    @abstractmethod
    def concat(self, xs: Sequence[Array]) -> Array:
        """Join along the first axis."""

    @abstractmethod
    def stack_columns(self, xs: Sequence[Array]) -> Array:
        """Join vectors of one length ``n`` as the columns of an ``[n, len(xs)]`` array."""

    @abstractmethod
    def cast(self, x: Array, dtype: str) -> Array:
        """Value conversion. float to float16 rounds half to even; float to int truncates, and a
        NaN gives any integer without raising (a step with a NaN is void anyway)."""

    @abstractmethod
    def bitcast(self, x: Array, dtype: str) -> Array:
        """The same bytes of a vector seen as another dtype, as a vector (little endian)."""

    def pad(self, x: Array, n: int, edge: bool = False) -> Array:
        """A vector lengthened to ``n``: by zeros, or by its last element."""
        missing = n - int(x.shape[0])
        if missing == 0:
            return x
        if edge:
            return self.concat([x, self.fill(x[-1:], missing)])
        return self.concat([x, self.zeros((missing,), self.dtype(x))])

    @abstractmethod
    def fill(self, x: Array, n: int) -> Array:
        """A vector of ``n`` copies of the one element of ``x``."""

    @abstractmethod
    def dtype(self, x: Array) -> str:
        """The dtype's name."""

    # -- elementwise ----------------------------------------------------------------------------

    @abstractmethod
    def abs(self, x: Array) -> Array: ...

    @abstractmethod
    def minimum(self, x: Array, y: Array | float) -> Array: ...

    @abstractmethod
    def maximum(self, x: Array, y: Array | float) -> Array: ...

    @abstractmethod
    def rint(self, x: Array) -> Array:
        """Nearest integer, half to even."""

    @abstractmethod
    def floor(self, x: Array) -> Array: ...

    @abstractmethod
    def count_at_most(self, x: Array, table: Array) -> Array:
        """For each element of a float32 vector, how many values of an ascending float32 ``table``
        are at most it, as int32: an element equal to ``table[i]`` counts it. A NaN gives any count."""

    @abstractmethod
    def where(self, condition: Array, x: Array | float, y: Array | float) -> Array:
        """float32 choice by a boolean array."""

    def flush(self, x: Array, below: float = 2.0**-126) -> Array:
        """float32 with 0.0 for what is smaller in magnitude than ``below``: by default -0.0 and
        denormals, of which frameworks make different things. NaN stays."""
        return self.where(self.abs(x) < below, 0.0, x)

    # -- bits of int32 --------------------------------------------------------------------------

    @abstractmethod
    def bit_and(self, x: Array, y: Array | int) -> Array: ...

    @abstractmethod
    def bit_or(self, x: Array, y: Array) -> Array: ...

    @abstractmethod
    def bit_xor(self, x: Array, y: Array) -> Array: ...

    @abstractmethod
    def shift_left(self, x: Array, bits: int) -> Array: ...

    @abstractmethod
    def shift_right(self, x: Array, bits: int) -> Array:
        """Logical shift: zeros come in at the top."""

    # -- reductions -----------------------------------------------------------------------------

    @abstractmethod
    def max_rows(self, x: Array) -> Array:
        """Largest of each row of ``[rows, n]``, as ``[rows]``; NaN wins."""

    @abstractmethod
    def min_rows(self, x: Array) -> Array:
        """Smallest of each row of ``[rows, n]``, as ``[rows]``; NaN wins."""

    def sum_rows(self, x: Array) -> Array:
        """Sum of each row of ``[rows, n]``, as ``[rows]``, in one fixed order: the upper half is
        added to the lower half until one column is left (rows are padded to a power of two)."""
        rows, n = int(x.shape[0]), int(x.shape[1])
        width = 1 << max(n - 1, 0).bit_length()
        if width != n:
            x = self.append_columns(x, width - n)
        while width > 1:
            width //= 2
            x = x[:, :width] + x[:, width:]
        return self.reshape(x, (rows,))

    @abstractmethod
    def append_columns(self, x: Array, n: int) -> Array:
        """``[rows, c]`` to ``[rows, c + n]``, the new columns zero."""

    @abstractmethod
    def all_finite(self, x: Array) -> Array:
        """``(1,)`` float32: 1 when every element is finite (an empty array is), else 0."""

    # -- selection ------------------------------------------------------------------------------

    @abstractmethod
    def top_indices(self, keys: Array, k: int) -> Array:
        """Indices (int32, ascending) of the ``k`` largest of a vector of int32 keys; among equal
        keys the lowest index goes first. Exactly ``k``, always."""

    def top_indices_above(self, keys: Array, threshold: Array, k: int) -> Array:
        """As :meth:`top_indices` of keys that are not negative, but only those of at least
        ``threshold`` (int32 ``(1,)``, not negative) are told apart; where fewer than ``k`` are, the
        lowest indices among the others fill up. The fewer pass the threshold, the cheaper."""
        return self.top_indices(keys * self.cast(keys >= threshold, "int32"), k)

    @abstractmethod
    def ones(self, bits: Array, k: int) -> Array:
        """Positions (int32, ascending) of the ``k`` ones in an int32 vector of zeros and ones, which
        is *not* trusted to have k. Raises PayloadError, or the framework's own error, if it has not
        and values can be looked at without making a device wait; elsewhere surplus ones are
        ignored and missing ones are positions past the end."""

    @abstractmethod
    def best_rows(self, x: Array, y: Array, bias: Array) -> Array:
        """For each row of ``x`` ``[m, d]`` the index (int32) of the row of ``y`` ``[c, d]`` with the
        largest ``x . y - bias``, ``bias`` being ``[c]``; the lowest of equal ones. The sums have no
        fixed order: exact, thus equal everywhere, only if all are integers or halves of integers
        below 2**23 and no element of x or y is above 2**11 (half-precision multipliers are exact
        then too). Memory stays at a few thousand rows times ``c``."""

    @abstractmethod
    def take(self, x: Array, indices: Array) -> Array:
        """Elements of a vector, or rows of a matrix, at int32 indices, which are valid by construction."""

    @abstractmethod
    def scatter_add(self, acc: Array, indices: Array, values: Array) -> Array:
        """``acc`` with ``values`` added at int32 ``indices``, which are *not* trusted.

        Raises PayloadError for an index outside ``acc`` where values can be looked at without
        making a device wait; elsewhere the framework's own bounds check applies."""

    # -- linear algebra -------------------------------------------------------------------------
    # In float32 whatever the caller's autocast says. The library chooses the order of additions, so
    # results differ by roundings between frameworks, processors and thread counts: nothing that
    # must be identical on all ranks may come from here.

    @abstractmethod
    def sqrt(self, x: Array) -> Array:
        """The IEEE square root, correctly rounded: the same bits everywhere."""

    @abstractmethod
    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        """Axis ``i`` of the result is axis ``axes[i]`` of ``x``."""

    @abstractmethod
    def matmul(self, x: Array, y: Array) -> Array:
        """``[m, k]`` times ``[k, n]``."""

    @abstractmethod
    def add_matmul(self, acc: Array, x: Array, y: Array) -> Array:
        """``acc + x y`` of ``[m, n]``; in place where the framework has in-place operations.
        ``acc`` is used up."""

    @abstractmethod
    def svd(self, x: Array) -> tuple[Array, Array, Array]:
        """Thin decomposition of a finite ``[m, n]``: ``u [m, k]``, ``s [k]`` falling, ``vt [k, n]``,
        ``k = min(m, n)``. Never raises: zeros if the library finds no decomposition. On CUDA it
        makes the device wait."""

    @abstractmethod
    def cond(self, which: Array, then: Callable[[], Array], otherwise: Callable[[], Array]) -> Array:
        """``then()`` if ``which`` (boolean, ``(1,)``), else ``otherwise()``; both of one shape. Only
        one is computed where looking at ``which`` makes no device wait, else both."""

    # -- state and results ----------------------------------------------------------------------

    @abstractmethod
    def accumulate(self, acc: Array, x: Array) -> Array:
        """``acc + x``; in place where the framework has in-place operations. ``acc`` is used up."""

    @abstractmethod
    def divide(self, x: Array, n: float) -> Array:
        """``x / n`` by an IEEE division, ``n`` rounded to float32 and not 0; in place where the framework
        has in-place operations. ``x`` is used up."""

    @abstractmethod
    def assign(self, target: Array, new: Array, ok: Array) -> None:
        """Store ``new`` in the state array ``target`` if ``ok`` (``(1,)``, 0 or 1); else leave
        every bit as it is."""

    @abstractmethod
    def poison(self, x: Array, ok: Array) -> Array:
        """``x`` if ``ok``, else NaN everywhere: what every rank gets in a void step."""
