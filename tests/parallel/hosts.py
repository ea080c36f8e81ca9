"""Exchange between declared hosts, with process sets made by ``hvd.init``, or with none. Run by test_hosts.py."""

import sys

import horovod.torch as hvd
import torch

import hvd_gradcomp.torch as gradcomp
from hvd_gradcomp import GradcompError

hvd.init(process_sets=gradcomp.host_process_sets(local=2) if sys.argv[1] == "made" else None)
param = torch.nn.Parameter(torch.zeros(40))
compression = gradcomp.Compression("topk(ratio=1)", [("w", param)], exchange="hierarchical(local=2)", min_size=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), named_parameters=[("w", param)],
                                     compression=compression)
try:
    (param.sum() * float(hvd.rank())).backward()
    optimizer.step()
except GradcompError as error:
    print(f"refused: {error}", flush=True)
else:
    print(f"mean {set(param.tolist())} by {compression.stats()['tensors']['w']['exchange']}", flush=True)
hvd.barrier()  # a rank that ends early takes the others down
