"""What this package relies on in stock Horovod (0.28.1): a release that changes it must fail here."""

import torch


class Recorder:
    """A stock compressor that notes what it is called with."""

    def __init__(self):
        self.calls = []

    def compress(self, tensor):
        self.calls.append(("compress", tensor))
        return tensor, None

    def decompress(self, tensor, ctx):
        self.calls.append(("decompress", tensor))
        return tensor


def optimizer_with(hvd, params, **kwargs):
    recorder = Recorder()
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    return recorder, hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), named_parameters=named,
                                              compression=recorder, **kwargs)


def test_compress_gets_the_gradient_itself(hvd):
    param = torch.nn.Parameter(torch.zeros(5))
    recorder, optimizer = optimizer_with(hvd, [param])
    param.sum().backward()
    assert recorder.calls[0][1] is param.grad
    optimizer.synchronize()


def test_the_post_accumulate_hook_fires_before_compress(hvd):
    param, order = torch.nn.Parameter(torch.zeros(5)), []
    recorder, optimizer = optimizer_with(hvd, [param])
    param.register_post_accumulate_grad_hook(lambda p: order.append(len(recorder.calls)))
    param.sum().backward()
    assert order == [0] and len(recorder.calls) == 1
    optimizer.synchronize()


def test_every_compress_comes_before_the_first_decompress(hvd):
    params = [torch.nn.Parameter(torch.zeros(5)) for _ in range(4)]
    recorder, optimizer = optimizer_with(hvd, params)
    (params[0].sum() + params[2].sum()).backward()  # the others have no gradient
    optimizer.synchronize()
    assert [kind for kind, _ in recorder.calls] == ["compress"] * 4 + ["decompress"] * 4
    assert all(any(tensor is p.grad for p in params) for kind, tensor in recorder.calls if kind == "compress")


def test_a_sparse_gradient_skips_compress(hvd):
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    recorder, optimizer = optimizer_with(hvd, [embedding.weight])
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.synchronize()
    assert [kind for kind, _ in recorder.calls] == ["decompress"]


def test_factors_act_on_what_compress_returns(hvd):
    """The token's premise: op and predivide reach the payload, wherever it comes from."""
    class Ones(Recorder):
        def compress(self, tensor):
            return torch.ones(1), tensor

        def decompress(self, tensor, ctx):
            self.calls.append(float(tensor))
            return torch.zeros_like(ctx)

    for kwargs, want in (({}, 1.0), ({"op": hvd.Sum}, float(hvd.size())), ({"gradient_predivide_factor": 2.0}, 1.0)):
        param, ones = torch.nn.Parameter(torch.zeros(5)), Ones()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), named_parameters=[("p", param)],
                                             compression=ones, **kwargs)
        param.sum().backward()
        optimizer.synchronize()
        assert abs(ones.calls[0] - want) < 1e-6, kwargs


def test_collectives_give_what_exchanges_expect(hvd):
    n, rank = hvd.size(), hvd.rank()
    gathered = hvd.allgather(torch.tensor([rank, 7], dtype=torch.uint8), name="seam.gather")
    assert gathered.tolist() == [x for r in range(n) for x in (r, 7)]
    assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Min, name="seam.min").tolist() == [0.0]
    assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Max, name="seam.max").tolist() == [n - 1.0]
    assert hvd.allreduce(torch.tensor([rank], dtype=torch.int32), op=hvd.Sum, name="seam.sum").tolist() == [
        n * (n - 1) // 2]


def test_integer_averages_are_useless(hvd):
    """Why payloads of codes are never averaged by Horovod: the mean of 1, 2, ... is cut to a whole number."""
    out = hvd.allreduce(torch.tensor([hvd.rank() + 1], dtype=torch.int32), op=hvd.Average, name="seam.floor")
    assert out.tolist() == [sum(range(1, hvd.size() + 1)) // hvd.size()]
