"""PyTorch ranks."""

import horovod.torch as horovod_torch
import pytest
import torch

horovod_torch.init()
torch.set_num_threads(1)

# A fixed set of one rank, for the tests that need sets (all ranks must add it together, at init).


@pytest.fixture
def hvd():
    return horovod_torch
