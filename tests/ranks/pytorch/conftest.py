"""PyTorch ranks."""

import horovod.torch as horovod_torch
import pytest
import torch

horovod_torch.init()
torch.set_num_threads(1)


@pytest.fixture
def hvd():
    return horovod_torch
