"""``powersgd``: low rank by power iteration from a warm start."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from hvd_gradcomp.codecs import matrix
from hvd_gradcomp.codecs.base import Answer, Claims, Codec, Ctx, Received, add, is_int
from hvd_gradcomp.ops.base import Array
from hvd_gradcomp.payload import Layout, Part, Parts
from hvd_gradcomp.spec import TensorSpec


@dataclass(frozen=True)
class PowerSGD(Codec):
    """The gradient as a matrix ``M [m, n]`` (:func:`matrix.view`) of rank ``rank``, ``P Q^T``, found by
    power iteration over the steps: the mean of one factor over all ranks is made orthonormal, and
    every rank multiplies its matrix by it to get the other factor.

    Alternating form, one all-reduce a step: an even step does ``Q = qr(Q); P = mean(M Q)``, an odd
    step ``P = qr(P); Q = mean(M^T P)``; the result is ``P Q^T``. Plain form: ``P = qr(mean(M Q));
    Q = mean(M^T P)`` in every step, two all-reduces. The residual is kept against the product of
    the orthonormal factor, common to all ranks, and the *local* other one; their mean is the result.

    The warm start (the last factor received) is kept in float32, ``rank * max(m, n)``, the same on
    all ranks. Columns of it that are zero or depend on the others, all of them in the first step
    and after a step of zeros, are drawn anew from the project's own generator.

    Args:
        rank: columns of the factors, at least 1.
        iterations: 1 or 2 per step. In the alternating form an iteration is one all-reduce, so with
            2 both factors are renewed in each step (what the plain form does with 1).
        alternate: the alternating or the plain form.

    Bytes: alternating (1 iteration) ``4 rank max(m, n)`` in every step, the shorter factor padded with
    zeros, since sizes may not depend on the step; else ``4 rank (m + n)``, and as much again for
    each further pair of all-reduces. A tensor for which this is no less than its elements
    (always so if ``rank >= min(m, n)``) travels dense, summed.

    Limits: a projection, so never longer than the input, but what is orthogonal to the warm start
    is not seen in that step: it needs error feedback. On a constant matrix the error tends to that
    of the best approximation of this rank (as the power of the ratio of singular values). Factors
    agree between frameworks to roundings, not bit for bit; orthonormal factors come from
    operations that are exact everywhere, so ranks never drift apart. On CUDA the alternating
    form computes both products to save a wait. Forms with several rounds hold a dense copy of the
    gradient plus residual until the last one.

    Source: Vogels et al. (2019), Algorithm 1; alternating form: Zhang et al. (2023), ACP-SGD.
    """

    name: ClassVar[str] = "powersgd"
    family: ClassVar[str] = "low rank"
    use: ClassVar[str] = "low rank by power iteration: summed, for large matrices"
    uses_step: ClassVar[bool] = True
    shaped: ClassVar[bool] = True
    interactive: ClassVar[bool] = True
    coded: ClassVar[tuple[str, ...]] = ("factor", "p", "q", "values")

    rank: int = 4
    iterations: int = 1
    alternate: bool = True

    def __post_init__(self) -> None:
        self._require(is_int(self.rank, 1), "rank", "a whole number from 1")
        self._require(is_int(self.iterations, 1, 2), "iterations", "1 or 2")
        self._require(type(self.alternate) is bool, "alternate", "True or False")

    @property
    def claims(self) -> Claims:  # type: ignore[override]
        return Claims(summable=self._halves == 1)

    @property
    def summable_rounds(self) -> bool:
        return True

    @property
    def _halves(self) -> int:
        """Products of the matrix with a factor per step: 1, 2 or 4. One renews one factor."""
        return self.iterations if self.alternate else 2 * self.iterations

    def layout(self, spec: TensorSpec) -> Layout:
        m, n = matrix.view(spec.shape)
        if self._halves == 1:
            parts: Layout = (Part("factor", self.rank * max(m, n), "float32"),)
        else:
            parts = (Part("p", self.rank * m, "float32"), Part("q", self.rank * n, "float32"))
        saves = self.rank < min(m, n) and sum(part.length for part in parts) < spec.numel
        return parts if saves else (Part("values", spec.numel, "float32"),)

    def _dense(self, spec: TensorSpec) -> bool:
        return self.layout(spec)[0].name == "values"

    def round_layouts(self, spec: TensorSpec) -> list[Layout]:
        layout = self.layout(spec)
        each: list[Layout] = [(part,) for part in layout]
        return each if len(layout) == 1 else each * (self._halves // 2)

    def state(self, spec: TensorSpec) -> dict[str, tuple[int, str]]:
        if self._dense(spec):
            return {}
        return {"factor": (self.layout(spec)[-1].length, "float32")}  # what the last round sends

    def advance(self, received: Parts, ctx: Ctx) -> dict[str, Array]:
        return {} if self._dense(ctx.spec) else {"factor": received["factor" if self._halves == 1 else "q"]}

    def encode(self, x: Array, ctx: Ctx) -> Parts:
        """The payload of a rank on its own: where there are several rounds, both factors are local."""
        if self._dense(ctx.spec):
            return {"values": x}
        if self._halves == 1:
            return self._new_factor(self._products(x, ctx), self._warm(ctx), ctx)
        power = self._power(self._products(x, ctx), ctx)
        own = next(power)
        while True:
            try:
                own = power.send((own, [own]))
            except StopIteration as end:
                p, own, _ = end.value
                return {"p": ctx.ops.reshape(p, (-1,)), **own}

    def decode(self, parts: Parts, acc: Array, ctx: Ctx) -> Array:
        if self._dense(ctx.spec):
            return ctx.ops.accumulate(acc, parts["values"])
        if self._halves == 1:
            return self._alternating(parts, self._warm(ctx), ctx)(acc)
        return self._plain(parts, self._rows(parts["p"], ctx), ctx)(acc)

    def rounds(self, load: Callable[[], Array], ctx: Ctx) -> Generator[Parts, Answer, Received]:
        if self._dense(ctx.spec):
            return (yield from super().rounds(load, ctx))
        of_x = ctx.products or self._products(load(), ctx)
        if self._halves == 1:
            warm = self._warm(ctx)
            own, received = yield self._new_factor(of_x, warm, ctx)
            product = partial(self._alternating, warm=warm, ctx=ctx)
        else:
            p, own, received = yield from self._power(of_x, ctx)
            product = partial(self._plain, p=p, ctx=ctx)
        total = add(received)
        return Received(sent=product(own), state=lambda: self.advance(total, ctx),
                        mean=lambda acc: ctx.ops.divide(product(total)(acc), ctx.ranks))

    # -- one factor a step: in rows of max(m, n), so that either factor fits ---------------------

    def _warm(self, ctx: Ctx) -> Array:
        """The orthonormal factor ``[rank, max(m, n)]``: Q in an even step, P in an odd one."""
        ops, (m, n) = ctx.ops, matrix.view(ctx.spec.shape)
        rows, spare = self._rows(ctx.state["factor"], ctx), self._spare(max(m, n), ctx)
        if m != n:
            ones = ops.zeros((max(m, n),)) + 1.0
            within = ops.where(self._even(ctx), ops.pad(ones[:n], max(m, n)), ops.pad(ones[:m], max(m, n)))
            rows, spare = rows * within, spare * within
        return matrix.orthonormal(ops, rows, spare)

    def _new_factor(self, of_x: matrix.Products, warm: Array, ctx: Ctx) -> Parts:
        ops, (m, n) = ctx.ops, matrix.view(ctx.spec.shape)

        def p() -> Array:
            return ops.append_columns(self._limit(of_x.left(warm[:, :n]), ctx), max(m, n) - m)

        def q() -> Array:
            return ops.append_columns(self._limit(of_x.right(warm[:, :m]), ctx), max(m, n) - n)

        return {"factor": ops.reshape(ops.cond(self._even(ctx), p, q), (-1,))}

    def _alternating(self, parts: Parts, warm: Array, ctx: Ctx) -> matrix.Product:
        ops, (m, n) = ctx.ops, matrix.view(ctx.spec.shape)
        new, even = self._rows(parts["factor"], ctx), self._even(ctx)
        p, q = ops.where(even, new, warm)[:, :m], ops.where(even, warm, new)[:, :n]
        return matrix.Product(ops, ops.permute(p, (1, 0)), q)

    @staticmethod
    def _even(ctx: Ctx) -> Array:
        return ctx.ops.bit_and(ctx.state["step"], 1) < 1

    # -- both factors in each step --------------------------------------------------------------

    def _power(self, of_x: matrix.Products, ctx: Ctx) -> Generator[Parts, Answer, tuple[Array, Parts, list[Parts]]]:
        """Returns P, orthonormal and common to all ranks, and what came of the last round, Q."""
        ops, (m, n) = ctx.ops, matrix.view(ctx.spec.shape)
        rows = self._rows(ctx.state["factor"], ctx)
        for half in range(0, self._halves, 2):
            q = matrix.orthonormal(ops, rows, self._spare(n, ctx, half))
            _, received = yield {"p": ops.reshape(self._limit(of_x.left(q), ctx), (-1,))}
            rows = self._rows(add(received)["p"], ctx)
            p = matrix.orthonormal(ops, rows, self._spare(m, ctx, half + 1))
            own, received = yield {"q": ops.reshape(self._limit(of_x.right(p), ctx), (-1,))}
            rows = self._rows(add(received)["q"], ctx)
        return p, own, received

    def _plain(self, parts: Parts, p: Array, ctx: Ctx) -> matrix.Product:
        return matrix.Product(ctx.ops, ctx.ops.permute(p, (1, 0)), self._rows(parts["q"], ctx))

    # -- factors are kept transposed: rank rows, each of them one direction ----------------------

    def _rows(self, factor: Array, ctx: Ctx) -> Array:
        return ctx.ops.reshape(factor, (self.rank, -1))

    @staticmethod
    def _products(x: Array, ctx: Ctx) -> matrix.Products:
        return matrix.DenseProducts(ctx.ops, x, matrix.view(ctx.spec.shape))

    def _limit(self, factor: Array, ctx: Ctx) -> Array:
        # Of the sum over ranks, too. What is cut stays in the residual.
        return matrix.limit(ctx.ops, factor, matrix.LIMIT / (ctx.ranks * self.rank))

    def _spare(self, n: int, ctx: Ctx, stream: int = 0) -> Array:
        return matrix.random_rows(ctx.ops, self.rank, n, seed=ctx.seed, spec=ctx.spec,
                                  step=ctx.state["step"], stream=stream)
