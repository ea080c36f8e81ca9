"""What is reduced (TensorSpec), and the spec strings that say how (``parse``)."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from hvd_gradcomp.errors import SpecError

if TYPE_CHECKING:
    from hvd_gradcomp.codecs.base import Codec


class TensorSpec(NamedTuple):
    """One tensor as a codec sees it: what decides payload sizes and randomness."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    """The gradient's own; codecs see float32 whatever it is."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def crc(self) -> int:
        """crc32 of the name, the same in every process (``hash()`` is not)."""
        return crc32(self.name.encode())


def parse(spec: str | Codec) -> Codec:
    """The codec that a spec string describes; a codec is returned as it is.

    A spec is a codec's name, with keyword arguments in parentheses if it takes any, and codecs
    joined by ``+`` where each later one encodes the values of the earlier::

        parse("topk(ratio=0.01)")
        parse("topk(ratio=0.001) + uniform(bits=8)")

    Raises:
        SpecError (a ValueError): names the part that is wrong and lists what exists.
    """
    from hvd_gradcomp.codecs.base import Codec
    from hvd_gradcomp.codecs.chain import Chain

    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"a codec is described by a string such as 'topk(ratio=0.01)', not by {spec!r}")
    try:
        # Only the syntax tree is used; nothing in it is ever evaluated.
        tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"cannot read codec spec {spec!r}: {getattr(error, 'msg', error)}") from None
    codecs = [_codec(node, spec) for node in _terms(tree)]
    return codecs[0] if len(codecs) == 1 else Chain(tuple(codecs))


def _terms(node: ast.expr) -> list[ast.expr]:
    terms: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):  # a + b + c is (a + b) + c
        terms.append(node.right)
        node = node.left
    return [node, *reversed(terms)]


def _codec(node: ast.expr, spec: str) -> Codec:
    from hvd_gradcomp.codecs.registry import make

    if isinstance(node, ast.Name):
        return make(node.id, {})
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise SpecError(f"cannot read {ast.unparse(node)!r} in codec spec {spec!r}: "
                        "expected a codec such as 'sign' or 'uniform(bits=8)', joined by '+'")
    name = node.func.id
    if node.args:
        raise SpecError(f"{name}: arguments are given by name, as in 'uniform(bits=8)'; "
                        f"found {ast.unparse(node.args[0])!r} in {spec!r}")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise SpecError(f"{name}: '**' has no meaning in a codec spec: {spec!r}")
        if keyword.arg in arguments:
            raise SpecError(f"{name}: {keyword.arg} is given twice in {spec!r}")
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise SpecError(f"{name}: {keyword.arg}={ast.unparse(keyword.value)} is no plain value "
                            "(a number, a string, True, False or None)") from None
    return make(name, arguments)
