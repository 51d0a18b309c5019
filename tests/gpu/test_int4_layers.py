"""A layer with both precisions on a GPU: INT4 by the kernel, and the branch that a CUDA graph keeps."""

import pytest
import torch

from sdsie_sglang.int4.calibration import calibrate
from sdsie_sglang.int4.precision import running_int4
from sdsie_sglang.int4.settings import CALIBRATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
N, K = 512, 1024


@pytest.fixture
def weight():
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.05).to("cuda", torch.bfloat16)


def dual_layer(weight):
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from sdsie_sglang.int4.method import DualLinearMethod

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    method = DualLinearMethod(UnquantizedLinearMethod(), "g128")
    method.quantise(layer)
    return layer, method


@pytest.mark.parametrize("name", CALIBRATIONS)
@pytest.mark.parametrize("rows", [1, 6, 64, 300])
def test_the_kernel_multiplies_by_the_effective_weight(weight, name, rows):
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from sdsie_sglang.int4.weight import Int4Weight

    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    found = calibrate(weight, name, inputs=torch.randn(64, K, device="cuda"))
    wanted = x.float() @ found.effective().T
    y = Int4Weight(found, torch.bfloat16, UnquantizedLinearMethod()).multiply(x).float()
    assert (y - wanted).norm() / wanted.norm() < 0.01


def test_a_graph_keeps_the_precision_it_was_captured_in(weight):
    layer, method = dual_layer(weight)
    x = torch.randn(1, K, device="cuda", dtype=torch.bfloat16)
    graphs = {}
    for int4 in (False, True):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            if int4:
                with running_int4():
                    method.apply(layer, x)
            else:
                method.apply(layer, x)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                if int4:
                    with running_int4():
                        y = method.apply(layer, x)
                else:
                    y = method.apply(layer, x)
        graphs[int4] = (graph, y)
    x.copy_(torch.randn_like(x))
    for graph, _ in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(graphs[False][1], torch.nn.functional.linear(x, weight))
    low = x.float() @ calibrate(weight, "g128").effective().T
    assert (graphs[True][1].float() - low).norm() / low.norm() < 0.01
    assert not torch.equal(graphs[True][1], graphs[False][1])


def test_new_weights_reach_a_captured_graph(weight):
    layer, method = dual_layer(weight)
    x = torch.randn(1, K, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), running_int4():
        method.apply(layer, x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = method.apply(layer, x)
    layer.weight.data.mul_(-2)
    method.quantise(layer)
    graph.replay()
    torch.cuda.synchronize()
    wanted = x.float() @ calibrate(layer.weight.data, "g128").effective().T
    assert (y.float() - wanted).norm() / wanted.norm() < 0.01
