"""The operations on torch tensors of any device. On CUDA nothing here waits for the device, but ``host``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvd_gradcomp import kernels
from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.ops.base import ROWS, Array, Ops
from hvd_gradcomp.ops.numpy import NumpyOps

DTYPES = {"float32": torch.float32, "float16": torch.float16, "int32": torch.int32,
          "int16": torch.int16, "uint8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_numpy = NumpyOps()


class TorchOps(Ops):
    name = "torch"
    in_place = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    def host(self, function: Callable[[dict[str, Any]], list[Any]], arrays: Mapping[str, Array],
             returns: Sequence[tuple[int, str]]) -> list[Array]:
        # the one exception: a device waits
        given = {name: x.cpu().numpy() for name, x in arrays.items()}
        return [torch.from_numpy(array).to(self.device) for array in function(given)]

    def host_update(self, function: Callable[[dict[str, Any]], None], targets: Mapping[str, Array],
                    arrays: Mapping[str, Array], ok: Array) -> None:
        if ok[0]:
            function({name: x.numpy() for name, x in (*arrays.items(), *targets.items())})

    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Array:
        return torch.zeros(tuple(shape), dtype=DTYPES[dtype], device=self.device)

    def arange(self, n: int) -> Array:
        return torch.arange(n, dtype=torch.int32, device=self.device)

    def constant(self, values: Any, dtype: str) -> Array:
        return torch.tensor(values, dtype=DTYPES[dtype], device=self.device)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return x.reshape(tuple(shape))

    def concat(self, xs: Sequence[Array]) -> Array:
        return torch.cat(list(xs))

    def stack_columns(self, xs: Sequence[Array]) -> Array:
        return torch.stack(list(xs), dim=1)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.to(DTYPES[dtype])

    def bitcast(self, x: Array, dtype: str) -> Array:
        if x.stride(-1) != 1:  # also for one element, which contiguous() would leave as it is
            x = x.clone(memory_format=torch.contiguous_format)
        return x.view(DTYPES[dtype])

    def fill(self, x: Array, n: int) -> Array:
        return x.expand(n)

    def dtype(self, x: Array) -> str:
        return NAMES[x.dtype]

    def abs(self, x: Array) -> Array:
        return x.abs()

    def minimum(self, x: Array, y: Array | float) -> Array:
        return torch.minimum(x, y) if isinstance(y, torch.Tensor) else x.clamp(max=y)

    def maximum(self, x: Array, y: Array | float) -> Array:
        return torch.maximum(x, y) if isinstance(y, torch.Tensor) else x.clamp(min=y)

    def rint(self, x: Array) -> Array:
        return torch.round(x)

    def floor(self, x: Array) -> Array:
        return torch.floor(x)

    def count_at_most(self, x: Array, table: Array) -> Array:
        return torch.bucketize(x, table, right=True, out_int32=True)

    def where(self, condition: Array, x: Array | float, y: Array | float) -> Array:
        return torch.where(condition, x, y)

    def bit_and(self, x: Array, y: Array | int) -> Array:
        return torch.bitwise_and(x, y)

    def bit_or(self, x: Array, y: Array) -> Array:
        return torch.bitwise_or(x, y)

    def bit_xor(self, x: Array, y: Array) -> Array:
        return torch.bitwise_xor(x, y)

    def shift_left(self, x: Array, bits: int) -> Array:
        return torch.bitwise_left_shift(x, bits)

    def shift_right(self, x: Array, bits: int) -> Array:
        if bits == 0:
            return x
        # torch shifts int32 arithmetically: mask off the copies of the sign
        return torch.bitwise_and(torch.bitwise_right_shift(x, bits), (1 << (32 - bits)) - 1)

    def max_rows(self, x: Array) -> Array:
        return x.amax(dim=1)

    def min_rows(self, x: Array) -> Array:
        return x.amin(dim=1)

    def append_columns(self, x: Array, n: int) -> Array:
        return torch.nn.functional.pad(x, (0, n))

    def largest(self, x: torch.Tensor) -> float | torch.Tensor:
        """The largest magnitude of a tensor of any real dtype, as a number or ``(1,)``; NaN or infinite unless all
        elements are finite."""
        kernel, _ = kernels.load()
        if kernel is not None and x.is_cpu and x.dtype == torch.float32 and x.is_contiguous():
            return float(kernel.largest(x.numpy(), None, 1.0, None))
        return torch.linalg.vector_norm(x, float("inf")).reshape(1)

    def all_finite(self, x: Array) -> Array:
        return torch.isfinite(x).all().reshape(1).to(torch.float32)

    def top_indices(self, keys: Array, k: int) -> Array:
        n = keys.numel()
        if k >= n:
            return self.arange(n)
        if self.device.type == "cpu":
            return torch.from_numpy(_numpy.top_indices(keys.numpy(), k))
        # No data-dependent shape, so no wait: find the k-th key, then number the kept entries.
        smallest = torch.topk(keys, k, sorted=False).values.amin()
        above, tie = keys > smallest, keys == smallest
        room = k - above.sum()
        return self._first(above | (tie & (torch.cumsum(tie, 0) <= room)), k)

    def top_indices_above(self, keys: Array, threshold: Array, k: int) -> Array:
        if self.device.type == "cpu":
            return torch.from_numpy(_numpy.top_indices_above(keys.numpy(), threshold.numpy(), k))
        return super().top_indices_above(keys, threshold, k)

    def ones(self, bits: Array, k: int) -> Array:
        if self.device.type == "cpu":
            return torch.from_numpy(_numpy.ones(bits.numpy(), k))
        return self._first(bits > 0, k)

    def _first(self, mask: Array, k: int) -> Array:
        """Positions of the first ``k`` True, then positions past the end; no data-dependent shape."""
        n = mask.numel()
        place = torch.where(mask, torch.cumsum(mask, 0) - 1, k).clamp(max=k)  # the others all write to slot k
        out = torch.full((k + 1,), n, dtype=torch.int32, device=self.device)
        return out.scatter_(0, place, self.arange(n))[:k]

    def best_rows(self, x: Array, y: Array, bias: Array) -> Array:
        best = [torch.argmax(part @ y.T - bias, dim=1) for part in x.split(ROWS)]
        return torch.cat(best).to(torch.int32)

    def take(self, x: Array, indices: Array) -> Array:
        return x.index_select(0, indices)

    def scatter_add(self, acc: Array, indices: Array, values: Array) -> Array:
        if self.device.type == "cpu" and indices.numel():
            low, high = torch.aminmax(indices)
            if low < 0 or high >= acc.numel():
                raise PayloadError(f"index outside 0..{acc.numel() - 1} in a sparse payload")
        return acc.index_add_(0, indices, values)

    def sqrt(self, x: Array) -> Array:
        if self.device.type == "cpu":  # torch's own is off by an ulp in one of six
            return torch.from_numpy(_numpy.sqrt(x.numpy()))
        return torch.sqrt(x)

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        return x.permute(tuple(axes))

    def matmul(self, x: Array, y: Array) -> Array:
        with self._float32(x):
            return torch.mm(x, y)

    def add_matmul(self, acc: Array, x: Array, y: Array) -> Array:
        with self._float32(x):
            return acc.addmm_(x, y)

    def svd(self, x: Array) -> tuple[Array, Array, Array]:
        try:
            with self._float32(x):
                u, s, vt = torch.linalg.svd(x, full_matrices=False)
            return u, s, vt
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # no convergence; an error on one rank would hang the others
            k = min(x.shape)
            return self.zeros((x.shape[0], k)), self.zeros((k,)), self.zeros((k, x.shape[1]))

    def cond(self, which: Array, then: Callable[[], Array], otherwise: Callable[[], Array]) -> Array:
        if self.device.type == "cpu":
            return then() if which[0] else otherwise()
        return torch.where(which, then(), otherwise())

    @staticmethod
    def _float32(x: Array) -> AbstractContextManager[object]:
        """Backward may run inside the user's autocast, which would multiply in half precision."""
        device = x.device.type
        return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()

    def accumulate(self, acc: Array, x: Array) -> Array:
        return acc.add_(x)

    def divide(self, x: Array, n: float) -> Array:
        # CUDA divides by a number of the host through its inverse, by one of the device as it should
        return x.div_(n if self.device.type == "cpu" else torch.full((1,), n, dtype=x.dtype, device=self.device))

    def assign(self, target: Array, new: Array, ok: Array) -> None:
        if self.device.type == "cpu":
            if ok[0]:
                target.copy_(new)
        else:
            torch.where(ok.bool(), new, target, out=target)

    def poison(self, x: Array, ok: Array) -> Array:
        if self.device.type == "cpu":
            return x if ok[0] else x.fill_(float("nan"))
        return x.masked_fill_(~ok.bool(), float("nan"))
