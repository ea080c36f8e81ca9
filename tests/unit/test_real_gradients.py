"""What only real gradients can show: those of a CNN on MNIST and of a transformer, at three points of training."""

import numpy as np
import pytest

from benchmarks import real_gradients
from hvd_gradcomp.codecs import threshold
from hvd_gradcomp.codecs.base import Ctx
from hvd_gradcomp.ops.numpy import NumpyOps
from hvd_gradcomp.spec import TensorSpec


@pytest.fixture(scope="module", params=["cnn", "language_model"])
def taken(request):
    return real_gradients.record(getattr(real_gradients, request.param)())


def test_the_learned_codebook_beats_the_fixed_one(taken) -> None:
    for point, steps in taken.items():
        fixed, _, _ = real_gradients.effect("vq(dim=8)", steps)
        learned, _, _ = real_gradients.effect("vq(dim=8, codebook='learned', refresh=4)", steps)
        assert learned < 0.97 * fixed, f"at step {point}: {learned:.3f} against {fixed:.3f}"


@pytest.mark.parametrize("ratio", [0.01, 0.001])
def test_the_statistical_threshold_reaches_the_asked_density(taken, ratio: float) -> None:
    """Within 20 %, over all large tensors of a step together, without cap or padding."""
    for point, steps in taken.items():
        asked = passed = 0
        for name, grad in steps[-1].items():
            if grad.size < 16384:
                continue
            x = grad.reshape(-1)
            ctx = Ctx(NumpyOps(), TensorSpec(name, x.shape), 1, 0, 0, state={"step": np.zeros(1, np.int32)})
            k = max(1, round(ratio * x.size))
            asked += k
            passed += int((np.abs(x).view(np.int32) >= threshold.statistical(x, k, ctx)).sum())
        assert 0.8 * asked <= passed <= 1.2 * asked, f"at step {point}: {passed} passed, {asked} asked"
