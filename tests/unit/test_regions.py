"""Regions of ``sparse_split``: every element in exactly one, large ones evenly wherever they are."""

import numpy as np
import pytest

from hvd_gradcomp.errors import PayloadError
from hvd_gradcomp.exchange.regions import Regions
from hvd_gradcomp.ops.numpy import NumpyOps

OPS = NumpyOps()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("numel", [1, 2, 7, 63, 64, 65, 1023, 5000])
def test_splitting_and_adding_are_inverse(numel: int, count: int) -> None:
    regions, x = Regions(numel, count), np.arange(1, numel + 1, dtype=np.float32)
    split = regions.split(OPS, x)
    assert split.shape == (count, regions.length) and regions.length * count < numel + 16 * count
    assert sorted(split[split > 0]) == x.tolist()
    back = np.zeros(numel, np.float32)
    for region in range(count):
        places = np.arange(regions.length, dtype=np.int32)
        back = OPS.scatter_add(back, *regions.entries(OPS, region, places, split[region]))
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("hot", ["rows", "columns", "a stretch"])
def test_no_region_gets_far_more_than_its_share(hot: str, count: int) -> None:
    x = np.zeros((512, 1024), np.float32)
    if hot == "rows":
        x[::64] = 1
    elif hot == "columns":
        x[:, ::96] = 1
    else:
        x[100:108] = 1
    shares = Regions(x.size, count).split(OPS, x.ravel()).sum(axis=1) / x.sum()
    assert np.abs(shares * count - 1).max() < 0.15, shares


@pytest.mark.parametrize("outside", [-1, 40, 2**31 - 1, -(2**31)])
def test_places_outside_are_refused(outside: int) -> None:
    regions = Regions(100, 3)
    assert regions.length == 48
    places = np.array([outside if outside != 40 else 48], np.int32)
    with pytest.raises(PayloadError):
        OPS.scatter_add(np.zeros(100, np.float32), *regions.entries(OPS, 1, places, np.ones(1, np.float32)))
