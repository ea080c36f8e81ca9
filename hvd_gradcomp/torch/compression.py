"""``Compression``: passed as ``compression=`` to the stock ``horovod.torch.DistributedOptimizer``."""

from __future__ import annotations

import json
import math
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from hvd_gradcomp import agreement, state, stats, token, unused
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.collectives import hvd_torch, local, process_sets
from hvd_gradcomp.collectives.hvd_torch import Bucket, OpenExchange, hvd
from hvd_gradcomp.errors import UsageError
from hvd_gradcomp.exchange import with_hosts
from hvd_gradcomp.exchange.base import BUCKET, Flow, wire_bytes
from hvd_gradcomp.flow import reduce_gradient
from hvd_gradcomp.memory import Momentum
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.plan import LARGE, Exchanges, Plan, Slot
from hvd_gradcomp.policy import DEFAULT_MIN_SIZE, Policy
from hvd_gradcomp.spec import TensorSpec
from hvd_gradcomp.torch import host
from hvd_gradcomp.torch.bound import Bound, flat, is_sparse, overlaps_itself, sample, storage_of

LossScale = Any
"""A number, a one-element tensor, a callable, or a GradScaler."""


class Compression:
    """Gradient compression for an unmodified ``horovod.torch.DistributedOptimizer``.

    ::

        compression = gradcomp.Compression("topk(ratio=0.01)", named_parameters=model.named_parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                             compression=compression)

    One Compression belongs to one optimizer. With one rank stock Horovod calls no compressor, so
    nothing is compressed and ``stats()`` shows no steps.

    A step in which any gradient on any rank holds an inf or NaN is void: every gradient becomes NaN
    on every rank (a loss scaler skips everywhere alike) and no residual or codec state moves.

    Args:
        compression: spec string or codec; or different ones by layer or by step, see :meth:`Policy.make`.
        named_parameters: as for the optimizer: ``model.named_parameters()``.
        exchange: how payloads are combined: ``"auto"``, ``"sum"``, ``"gather"``, ``"two_stage"``,
            ``"sparse_split"``, ``"hierarchical"`` (dense inside a host; see docs/exchange.md); or a dict of name
            patterns to these.
        min_size: tensors with fewer elements are left to Horovod; 0 compresses all.
        process_set: the one that the optimizer gets.
        loss_scale: what the loss is multiplied by (a GradScaler, a callable, a number): residuals
            are kept divided by it.
        seed: of the stochastic codecs.
        error_feedback: keep what was not sent and add it to the next gradient.
        large: tensors with more elements are exchanged in pieces after the backward pass, so that extra memory stays
            at a few pieces, if their codec needs neither their shape nor a state of its own; None for never.
        verify: send a checksum with what is gathered; wrong bytes are an error that names their rank, at a cost
            (``docs/state.md``). For all ranks alike.
        sgd: gives what the optimizer does with a parameter's gradient, which is then done before
            compression: for :func:`hvd_gradcomp.torch.DGCOptimizer`.

    Raises:
        SpecError: a spec, exchange or min_size that cannot be.
        UsageError: ``named_parameters`` is not a sequence of (unique name, parameter).
    """

    none = hvd.Compression.none
    """Horovod's own ``hvd.Compression.none``."""
    fp16 = hvd.Compression.fp16
    """Horovod's own ``hvd.Compression.fp16``: a plain cast, without error feedback or scaling."""

    def __init__(self, compression: Any,
                 named_parameters: Iterable[tuple[str, torch.nn.Parameter]], *, exchange: Exchanges = "auto",
                 min_size: int = DEFAULT_MIN_SIZE, process_set: Any = hvd.global_process_set,
                 loss_scale: LossScale = None, seed: int = 0, error_feedback: bool = True,
                 verify: bool = False, large: int | None = LARGE,
                 sgd: Callable[[torch.nn.Parameter], Momentum] | None = None) -> None:
        named = _named(named_parameters)
        complex_names = {name for name, param in named if param.is_complex()}
        self.plan = Plan.make(
            [TensorSpec(name, tuple(param.shape), str(param.dtype).removeprefix("torch.")) for name, param in named],
            Policy.make(compression, min_size), ranks=process_set.size() or 1,
            exchange=with_hosts(exchange, lambda: process_sets.local_size(hvd, process_set)), seed=seed,
            error_feedback=error_feedback, dgc=sgd is not None, verify=verify, large=large,
            refuse=lambda spec: "complex dtype" if spec.name in complex_names else "")
        self.process_set = process_set
        self.loss_scale = loss_scale
        self.sgd = sgd
        self._bound = {name: Bound(self.plan.slots[name], param) for name, param in named}
        self._by_param = {id(b.param): b for b in self._bound.values()}
        self._by_grad: dict[int, Bound] = {}
        self._last: Bound | None = None  # whose gradient was accumulated last
        for b in self._bound.values():
            if b.param.requires_grad:
                b.param.register_post_accumulate_grad_hook(self._remember)  # type: ignore[no-untyped-call]
        self.new_gradients = False
        """Whether a gradient was accumulated since the last step was finished."""
        self._process = os.getpid()
        self._called = False
        self._name = ""  # prefix of our collectives, once the ranks agreed
        self._ranks: list[int] = []
        self._sets: process_sets.Sets = {}
        self._place = 0, 0  # (rank, ranks) when they agreed
        self._token: torch.Tensor | None = None
        self._token_checked = False
        self._open: list[Bound] = []  # compressed in this step, in that order
        self._buckets: list[Bucket] = []
        self._running: deque[OpenExchange] = deque()  # of them, those with rounds to go
        self._expected = 0
        self._sharers: Counter[int] = Counter()  # gradients of this step in one storage
        self._magnitudes: list[float | torch.Tensor] = []
        self._step_scale: Any = None  # the loss scale of this step
        self._flag: int | None = None
        self._verdict: torch.Tensor | None = None
        reference = weakref.ref(self)  # the watch must not keep the residuals alive
        unused.watch(f"Compression({self.plan.policy})", lambda: _was_used(reference()), hvd.size)

    # -- what Horovod calls ---------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start the exchange of a gradient; gives Horovod the token that it reduces instead.

        Never waits, except once: before the first exchange the ranks compare their configuration.

        Raises:
            UsageError: the tensor is not the gradient of a bound parameter, or came twice.
            DisagreementError: on every rank, if the ranks were configured differently.
        """
        self._called = True
        if os.getpid() != self._process:
            raise UsageError("this process was forked from the one that made the Compression, and Horovod does not run "
                             "in it: compute gradients there, but reduce them in the first")
        b = self._find(tensor)
        if not self._open and self._ranks != self.process_set.ranks:
            self.rejoin()  # the first step, or Horovod's elastic mode has removed ranks
        if not self._name:
            self._agree()
        if b.grad is not None:
            raise UsageError(f"the gradient of {b.slot.spec.name!r} was compressed twice in one step: call "
                             "optimizer.synchronize() or step() before the next backward pass (and give each "
                             "optimizer a Compression of its own)")
        if not self._open:
            self._begin()
        b.grad = tensor
        self._open.append(b)
        payload = self._dense(b, tensor) if b.slot.codec is None else self._compressed(b, tensor)
        if self.plan.compresses and len(self._open) == self._expected:
            self._start_flag()
        return payload, b

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The gradient that the optimizer is to see. The first call of a step finishes all of its
        exchanges.

        Raises:
            ProcessSetError: Horovod and this Compression reduce over different process sets.
            UsageError: a gradient was changed between backward() and synchronize().
        """
        self._finish()
        assert self._verdict is not None
        if ctx is None:  # a sparse gradient, which Horovod gathered by itself
            return tensor if not self.plan.compresses or bool(self._verdict) else tensor * float("nan")
        b: Bound = ctx
        if b.slot.codec is None:
            out = torch.view_as_complex(tensor) if b.param.is_complex() else tensor.to(b.param.dtype)
            return b.ops.poison(out, self._verdict.to(out.device)) if self.plan.compresses else out
        if not self._token_checked:
            token.check(tensor.tolist(), self._ranks, hvd.size())
            self._token_checked = True
        mean, b.mean = b.mean, None
        assert mean is not None
        if tensor.is_cpu:
            factor = token.factor(tensor.tolist()[0])
            return mean if factor == 1.0 else mean.mul_(factor)
        rounded = torch.round(tensor[0])  # the same snap without waiting for the device
        close = (tensor[0] - rounded).abs() <= 1e-6 * tensor[0].abs().clamp(min=1.0)
        return mean.mul_(torch.where(close, rounded, tensor[0]).to(mean.dtype))

    # -- one step -------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._expected = sum(b.param.requires_grad for b in self._bound.values())
        self._verdict = None
        self._step_scale = self._scale()
        self._running.clear()
        members = Counter(b.bucket[0] for b in self._bound.values() if b.bucket and b.param.requires_grad)
        for bucket in self._buckets:
            bucket.begin(members[bucket])

    def _dense(self, b: Bound, tensor: torch.Tensor) -> torch.Tensor:
        """Leave a gradient to Horovod, in a dtype that it can carry."""
        self._watch(b, tensor.detach())
        if tensor.is_complex():
            return torch.view_as_real(tensor).contiguous()
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    def _compressed(self, b: Bound, tensor: torch.Tensor) -> torch.Tensor:
        # GradScaler unscales without counting up the version. Looking at values would make a device wait, unless a
        # scaler does so anyhow.
        looks = tensor.is_cpu or hasattr(self.loss_scale, "get_scale")
        b.probe = sample(tensor) if looks else None
        if b.slot.cuts:  # its turn comes when the step's verdict is known, so that no payload has to be kept until then
            b.version = tensor._version
            self._watch(b, tensor.detach())
            hvd_torch.poll(self._running)
        else:
            flow, x = self._flow(b, tensor, len(self._ranks), self.process_set.rank())
            with host.quiet():
                b.exchange = OpenExchange(f"{self._name}.{b.slot.spec.name}.{b.stage}", flow, self._sets, b.bucket)
                if not b.exchange.finite:
                    self._watch(b, x)
                self._running.append(b.exchange)
                hvd_torch.poll(self._running)
        assert self._token is not None
        return self._token.clone() if tensor.is_cpu else self._token.to(tensor.device, copy=True)

    def _flow(self, b: Bound, tensor: torch.Tensor, ranks: int, rank: int) -> tuple[Flow, torch.Tensor]:
        """The way of a gradient, not begun yet, and the gradient as a float32 vector."""
        slot = b.slot
        if not slot.complete or b.ops.device != tensor.device:
            self._allocate(b, tensor.device)
        b.version, b.storage = tensor._version, storage_of(tensor)
        # By logical index, so that ranks with different memory layouts mean the same elements; no
        # copy for a contiguous float32 gradient.
        x = flat(tensor)
        self._find_stage(b)
        sgd = self.sgd(b.param) if self.sgd else None
        if x.is_cpu and host.fits(slot, b.stage):
            return host.flow(x, slot, self.plan, ranks, rank, stage=b.stage, loss_scale=self._step_scale, sgd=sgd,
                             output=lambda clear: self._output(b, x, clear)), x
        ctx = Ctx(b.ops, slot.spec, ranks, rank, self.plan.seed, state=slot.state,
                  error_feedback=self.plan.error_feedback, buffers=slot.buffers)
        return reduce_gradient(x, slot, ctx, stage=b.stage, loss_scale=self._step_scale, sgd=sgd,
                               output=lambda clear: self._output(b, x, clear)), x

    @staticmethod
    def _find_stage(b: Bound) -> None:
        if b.stage + 1 < len(b.slot.stages):  # in the last stage nothing is looked up, so no device waits
            b.stage = b.slot.stage(int(b.slot.state["step"][0]))

    def _in_pieces(self, b: Bound) -> None:
        """Reduce a large gradient, piece by piece, where it is. Extra memory is that of a few pieces."""
        tensor, slot = b.grad, b.slot
        assert tensor is not None and self._verdict is not None
        self._allocate(b, tensor.device)
        self._find_stage(b)
        x = flat(tensor)
        out = x if self._is_private(tensor, x) else torch.empty_like(x)

        def output(begin: int, end: int) -> Callable[[bool], Array]:
            return lambda clear: out[begin:end].zero_() if clear else out[begin:end]

        def flows() -> Iterator[tuple[str, Flow]]:
            for i, (begin, end) in enumerate(slot.cuts):
                piece = slot.piece(begin, end)
                step = {"step": slot.state["step"]} if "step" in slot.state else {}
                ctx = Ctx(b.ops, piece.spec, len(self._ranks), self.process_set.rank(), self.plan.seed,
                          state={**piece.state, **step}, error_feedback=self.plan.error_feedback)
                # Names come again, except that of the last piece, whose size may be another one.
                number = "last" if end == slot.spec.numel else i % (hvd_torch.WINDOW + 1)
                yield (f"{self._name}.{slot.spec.name}.{b.stage}.{number}",
                       reduce_gradient(x[begin:end], piece, ctx, stage=b.stage, loss_scale=self._step_scale,
                                       output=output(begin, end)))

        means = hvd_torch.in_turn(flows(), self._sets, self._verdict.to(b.ops.device))
        for (begin, end), mean in zip(slot.cuts, means, strict=True):
            if mean.data_ptr() != out[begin:end].data_ptr():
                out[begin:end] = mean
        b.mean = self._into_gradient(b, out)

    def _watch(self, b: Bound, x: torch.Tensor) -> None:
        """Note a gradient, detached, for the step flag: its largest magnitude is finite exactly if all of it is."""
        if self.plan.compresses and x.numel():
            self._magnitudes.append(b.ops.largest(x))

    def _start_flag(self) -> None:
        """One verdict for the whole step: is everything finite on every rank?"""
        self._flag = hvd.allreduce_async(self._finite(), name=f"{self._name}.flag", op=hvd.Min,
                                         process_set=self.process_set)

    def _finite(self) -> torch.Tensor:
        """Whether everything that was watched in this step is finite, float32 ``(1,)``."""
        numbers = all(math.isfinite(m) for m in self._magnitudes if isinstance(m, float))
        tensors = [m for m in self._magnitudes if isinstance(m, torch.Tensor)]
        self._magnitudes = []
        if not tensors:
            return torch.tensor([float(numbers)])
        device = tensors[0].device
        # Finite in their own dtype: what float64 holds may be infinite in float32.
        finite = [m if m.dtype == torch.float32 and m.device == device else
                  torch.where(torch.isfinite(m), 0.0, float("inf")).to(device, torch.float32) for m in tensors]
        return torch.isfinite(torch.cat(finite)).all().reshape(1).float() * float(numbers)

    def _finish(self) -> None:
        """Finish all exchanges of the step, once: wait for the rounds and the verdict, settle, decode."""
        self.new_gradients = False
        if not self._open:
            if self._verdict is None:  # every gradient of this step is sparse
                self._verdict = torch.ones(1)
            return
        if not self.plan.compresses:
            self._verdict = torch.ones(1)
        else:
            if self._flag is None:
                self._watch_sparse()
                self._start_flag()
            with host.quiet():
                hvd_torch.finish([b.exchange for b in self._open if b.exchange is not None], self._buckets)
            self._verdict, self._flag = hvd.synchronize(self._flag), None
        self._refuse_changed()
        self._sharers = Counter(storage_of(b.grad) if b.exchange is None else b.storage for b in self._open
                                if b.grad is not None)
        with host.quiet():
            for b in self._open:
                if b.exchange is not None:
                    assert b.grad is not None
                    mean = b.exchange.commit(self._verdict if b.grad.is_cpu else self._verdict.to(b.ops.device))
                    b.mean = self._into_gradient(b, mean)
        for b in self._bound.values():  # in an order that all ranks have in common
            if b.grad is not None and b.slot.cuts:
                self._in_pieces(b)
        for b in self._open:
            b.steps[b.stage] += 1
            b.grad = b.exchange = None
        self._open = []
        self._by_grad = {}

    def _refuse_changed(self) -> None:
        changed = [b.slot.spec.name for b in self._open if b.slot.codec is not None and b.is_changed()]
        if changed:
            for b in self._open:
                b.grad = b.exchange = None
            self._open = []
            raise UsageError(f"the gradient of {changed[0]!r} was changed after backward() and before it was reduced; "
                             "call optimizer.synchronize() before clipping, unscaling or zeroing gradients; with a "
                             "GradScaler: synchronize(), scaler.unscale_(), and scaler.step() inside "
                             "skip_synchronize()")

    def _output(self, b: Bound, x: torch.Tensor, clear: bool) -> torch.Tensor:
        """Memory for the mean, zeros if ``clear``: the gradient's own, or the copy's, if nothing else lives in it."""
        grad = b.grad
        assert grad is not None
        out = x if self._is_private(grad, x) else torch.empty_like(x)
        return out.zero_() if clear else out

    def _is_private(self, grad: torch.Tensor, x: torch.Tensor) -> bool:
        """Whether nothing else lives where ``x``, a gradient as a vector, is."""
        return x.data_ptr() != grad.data_ptr() or self._sharers[storage_of(grad)] == 1

    def step_alone(self, sparse_as_dense: bool = False) -> None:
        """For a rank that exchanges with nobody, where Horovod calls no compressor: put into every
        ``param.grad`` what one step's ``compress`` and ``decompress`` over a single rank would give."""
        self._called, self.new_gradients = True, False
        bound = [b for b in self._bound.values() if b.param.grad is not None]
        self._magnitudes, self._step_scale = [], self._scale()
        flows = []
        for b in bound:
            if sparse_as_dense and is_sparse(b.param):
                b.param.grad = b.param.grad.to_dense()  # type: ignore[union-attr]
            b.grad = b.param.grad
            assert b.grad is not None
            if b.slot.codec is not None and not b.grad.is_sparse:
                flow, x = self._flow(b, b.grad, 1, 0)
                self._watch(b, x)
                flows.append((b, flow))
            else:
                self._watch(b, (b.grad._values() if b.grad.is_sparse else b.grad).detach())
        verdict = self._finite()
        self._sharers = Counter(storage_of(b.grad) for b, _ in flows if b.grad is not None)
        with host.quiet():
            for b, flow in flows:
                b.param.grad = self._into_gradient(b, local.alone(b.ops, flow, verdict.to(b.ops.device)))
                b.steps[b.stage] += 1
        for b in bound:
            b.grad = None

    def _into_gradient(self, b: Bound, mean: torch.Tensor) -> torch.Tensor:
        grad = b.grad
        assert grad is not None
        out = grad.detach()
        if mean.data_ptr() == grad.data_ptr():
            return out
        if self._sharers[storage_of(grad)] > 1 or overlaps_itself(grad):
            out = torch.empty_like(b.param, memory_format=torch.preserve_format).detach()
        return out.copy_(mean.view(grad.shape))  # keeps strides and dtype

    # -- which parameter ------------------------------------------------------------------------

    def _remember(self, param: torch.Tensor) -> None:
        """Runs just before Horovod's own hook of the same parameter."""
        self._last = self._by_param[id(param)]
        self.new_gradients = True
        self._verdict = None  # a new step has begun

    def _find(self, tensor: torch.Tensor) -> Bound:
        last = self._last
        if last is not None and last.param.grad is tensor:
            return last
        found = self._by_grad.get(id(tensor))
        if found is None or found.param.grad is not tensor:
            self._by_grad = {id(b.param.grad): b for b in self._bound.values() if b.param.grad is not None}
            found = self._by_grad.get(id(tensor))
        if found is not None:
            return found
        # sparse_as_dense=True: Horovod made the tensor, from the gradient that was accumulated last
        if last is not None and last.grad is None and is_sparse(last.param) and last.param.shape == tensor.shape:
            return last
        if id(tensor) in self._by_param:
            raise UsageError("op=Adasum combines parameter updates by their angles, which no payload can carry: use "
                             "op=Average or op=Sum with compression")
        raise UsageError(f"asked to compress a tensor of shape {tuple(tensor.shape)} that is no gradient of the "
                         f"{len(self._bound)} parameters this Compression was given: pass it the same "
                         "named_parameters as the optimizer")

    def _watch_sparse(self) -> None:
        """Sparse gradients never reach compress(), but a NaN in one voids the step all the same."""
        for b in self._bound.values():
            if b.grad is None and is_sparse(b.param):
                assert b.param.grad is not None
                self._watch(b, b.param.grad._values().detach())

    # -- before the first exchange --------------------------------------------------------------

    def _agree(self) -> None:
        if not self.process_set.included():
            raise UsageError(f"this rank is not in the Compression's process set {self.process_set.ranks}")
        old, (rank, ranks) = self.plan, self.world
        if old.ranks != ranks:
            self._use(old.for_ranks(ranks))
        name = agreement.new_name(self.process_set.ranks)
        agreement.check(self.plan, lambda data: hvd_torch.gather_bytes(data, self.process_set, name))
        places = [tuple(json.loads(place)) for place in self.gather_bytes(json.dumps(self._place).encode())]
        if {count for _, count in places} not in ({0}, {ranks}):
            self._allocate_all()
            self._spread(old, places)
        self._sets = process_sets.connect(hvd, self.process_set, self.plan.exchanges)
        self._place = rank, ranks
        self._name = name
        self._ranks = list(self.process_set.ranks)
        self._token = torch.tensor(token.values(self._ranks, hvd.rank(), hvd.size()))
        self._token_checked = False
        self._fill_buckets()

    def _spread(self, old: Plan, places: list[tuple[int, int]]) -> None:
        def broadcast(array: Any, root: int, name: str) -> Any:
            return hvd.broadcast(torch.from_numpy(array), self.process_set.ranks[root], name=name,
                                 process_set=self.process_set).numpy()

        def add(array: Any, name: str) -> Any:
            return hvd.allreduce(torch.from_numpy(array), op=hvd.Sum, name=name, process_set=self.process_set).numpy()

        state.spread(old, self.plan, places, self.world[0], broadcast=broadcast, add=add,
                     store=lambda target, array: target.copy_(torch.from_numpy(array)))

    def _fill_buckets(self) -> None:
        """Neighboring tensors that go by all-to-all share messages of up to BUCKET bytes. Those of a schedule,
        whose sizes change, go alone."""
        self._buckets, room = [], 0
        for place, b in enumerate(self._bound.values()):
            b.bucket = None
            if len(b.slot.stages) != 1:
                continue
            exchange, codec = b.slot.stages[0].exchange, b.slot.stages[0].codec
            if exchange.groups(len(self._ranks)) or b.slot.cuts:
                continue
            nbytes = sum(n for how, n in exchange.sends(codec, b.slot.spec, len(self._ranks)) if how == "all_to_all")
            if not 0 < nbytes < BUCKET:
                continue
            if nbytes > room:
                self._buckets.append(Bucket(f"{self._name}.bucket.{len(self._buckets)}", self.process_set))
                room = BUCKET
            b.bucket = self._buckets[-1], place
            room -= nbytes

    def _scale(self) -> Any:
        scale = self.loss_scale
        if hasattr(scale, "get_scale"):
            return scale.get_scale()
        return scale() if callable(scale) else scale

    # -- what users ask -------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Bytes and choices so far on this rank.

        Returns:
            ``steps``; ``wire_bytes_sent`` and ``wire_bytes_received`` (this rank's, counted as ring
            collectives, tokens and step flag included); ``dense_bytes`` (what a float32 ring
            all-reduce would have received); ``ratio`` (dense_bytes / wire_bytes_received);
            ``ranks``; ``tensors``: per parameter codec, exchange, payload bytes, residual norm, or
            the reason why it is not compressed.
        """
        ranks = self.process_set.size() or 1
        compressed = sum(slot.codec is not None for slot in self.plan.slots.values())
        token_size = len(self._token) if self._token is not None else 0
        overhead = wire_bytes("sum", 4 * (token_size * compressed + 1), ranks) if compressed else 0.0
        extra: dict[str, dict[str, Any]] = {}
        for name, b in self._bound.items():
            residual = b.slot.state.get("residual")
            if residual is not None:
                extra[name] = {"residual_norm": float(torch.linalg.vector_norm(residual))}
            if is_sparse(b.param) and not any(b.steps):
                extra[name] = {"codec": None, "exchange": "horovod", "payload_bytes": None,
                               "reason": "sparse gradient: Horovod gathers it"}
        return stats.summary(self.plan, ranks, {name: b.steps for name, b in self._bound.items()}, extra, overhead)

    def parameters(self) -> list[tuple[Slot, torch.nn.Parameter]]:
        """The compressed parameters with their slots, whose state arrays exist."""
        self._allocate_all()
        return [(b.slot, b.param) for b in self._bound.values() if b.slot.codec is not None]

    @property
    def world(self) -> tuple[int, int]:
        """``(rank, ranks)`` among those that reduce together."""
        return self.process_set.rank() or 0, self.process_set.size() or 1

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and codec state: tensors and plain values, for one file per rank. See
        :mod:`hvd_gradcomp.checkpoint` for files, and :mod:`hvd_gradcomp.state` for what it holds."""
        self._allocate_all()
        return state.save(self.plan, *self.world, lambda array: array.clone())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` of the same rank, world size and configuration.

        Raises StateError, before anything is changed, if it does not fit.
        """
        self._allocate_all()
        state.check(state_dict, self.plan, *self.world)
        self._put(state_dict)
        self._place = self.world

    def plan_for(self, saved: Mapping[str, Any]) -> Plan:
        """For :mod:`hvd_gradcomp.checkpoint`: the plan with all state arrays."""
        self._allocate_all()
        return self.plan

    def _put(self, state_dict: Mapping[str, Any]) -> None:
        state.put(state_dict, self.plan, lambda target, saved: target.copy_(torch.as_tensor(saved)))
        for b in self._bound.values():
            b.stage = 0  # looked up anew from the restored step

    # -- Horovod's elastic mode -----------------------------------------------------------------

    def snapshot(self) -> Any:
        """What :meth:`rewind` goes back to."""
        return self.state_dict(), self.plan, self._place

    def rewind(self, snapshot: Any) -> None:
        """Back to a snapshot of this same object, after a step that was cut off by a lost rank."""
        saved, plan, self._place = snapshot
        self._use(plan)
        self._put(saved)
        for b in self._bound.values():
            b.grad = b.exchange = b.mean = None
        self._open, self._by_grad, self._magnitudes = [], {}, []
        self._running.clear()
        self._flag = self._verdict = None
        self.rejoin()

    def _use(self, plan: Plan) -> None:
        self.plan = plan
        for name, b in self._bound.items():
            b.slot = plan.slots[name]

    def rejoin(self) -> None:
        """Before the next exchange compare the ranks' configurations again, and spread what is kept if these are
        other ranks than before."""
        self._name = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("a Compression cannot be copied or pickled: it is bound to the parameters of one optimizer. "
                         "Save its state_dict(), and load that into a new Compression")

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's bytes in rank order; waits for all ranks."""
        if self.world[1] == 1:
            return [data]
        return hvd_torch.gather_bytes(data, self.process_set, "gradcomp.state")

    def _allocate_all(self) -> None:
        for b in self._bound.values():
            self._allocate(b, b.ops.device)

    def _allocate(self, b: Bound, device: torch.device) -> None:
        """State arrays on the gradient's device."""
        if b.ops.device != device:
            b.ops = TorchOps(device)
            b.slot.state = {key: array.to(device) for key, array in b.slot.state.items()}
            b.slot.buffers.clear()
        self.plan.allocate(b.slot, lambda name, length, dtype: b.ops.zeros((length,), dtype))


def _was_used(compression: Compression | None) -> bool:
    return compression is None or compression._called


def _named(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
    named = list(named_parameters)
    if not named:
        raise UsageError("named_parameters is empty (a generator can be read only once: call "
                         "model.named_parameters() again for each use)")
    for item in named:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)):
            raise UsageError("named_parameters must be (name, parameter) pairs, as model.named_parameters() gives")
    return named
