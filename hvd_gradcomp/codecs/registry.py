"""All codecs by name. Adding one: write its file, add its class here, run ``make golden``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hvd_gradcomp.codecs.base import Codec
from hvd_gradcomp.codecs.blocktopk import BlockTopK
from hvd_gradcomp.codecs.cast import Bf16, Fp16
from hvd_gradcomp.codecs.chain import Chain
from hvd_gradcomp.codecs.dense import Dense
from hvd_gradcomp.codecs.log import Log
from hvd_gradcomp.codecs.natural import Natural
from hvd_gradcomp.codecs.powersgd import PowerSGD
from hvd_gradcomp.codecs.qsgd import Qsgd
from hvd_gradcomp.codecs.randomk import RandomK
from hvd_gradcomp.codecs.sign import Sign
from hvd_gradcomp.codecs.svd import SVD
from hvd_gradcomp.codecs.tensor_train import TensorRing, TensorTrain
from hvd_gradcomp.codecs.ternary import Ternary
from hvd_gradcomp.codecs.topk import TopK
from hvd_gradcomp.codecs.uniform import Uniform
from hvd_gradcomp.codecs.vq import Vq
from hvd_gradcomp.errors import SpecError

CODECS: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (
        Dense,
        Fp16,
        Bf16,
        Uniform,
        Log,
        Qsgd,
        Ternary,
        Sign,
        Natural,
        Vq,
        TopK,
        RandomK,
        BlockTopK,
        SVD,
        PowerSGD,
        TensorTrain,
        TensorRing,
    )
}


def make(name: str, arguments: Mapping[str, Any]) -> Codec:
    """The codec ``name(**arguments)``. Raises SpecError that lists what exists."""
    if name not in CODECS:
        near = difflib.get_close_matches(name, CODECS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"there is no codec {name!r}.{hint} Codecs: {', '.join(CODECS)}")
    known = [f.name for f in fields(CODECS[name])]
    for argument in arguments:
        if argument not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no arguments"
            raise SpecError(f"{name} has no argument {argument!r}: it {takes}")
    return CODECS[name](**arguments)


def from_config(config: Mapping[str, Any]) -> Codec:
    """The codec of :meth:`Codec.config`. Raises SpecError for anything else."""
    arguments = dict(config)
    name = arguments.pop("codec", None)
    if name == Chain.name:
        return Chain(tuple(from_config(each) for each in arguments["codecs"]))
    return make(str(name), arguments)
