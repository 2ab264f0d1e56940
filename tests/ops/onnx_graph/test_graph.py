"""Building and running graphs: forbidden operations of a forward, and ownership of memory."""

import numpy as np
import pytest

import fd_core.ops.onnx_graph.session as sessions
from fd_core.errors import PluginError
from fd_core.ops.contract import Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.numpy.sampling import NumpySampling
from fd_core.ops.onnx_graph.graph import Graph, GraphSymbol, TraceError
from fd_core.ops.onnx_graph.pack import OnnxOps
from fd_core.ops.onnx_graph.session import CPU, Provider, Session


def test_forward_uses_only_operations_of_the_pack():
    """It inherits weights and sampling from the numpy pack; silently computing in numpy would void the tests."""
    hosts = {"allocate_kv", "from_host", "to_host", "prepare_vector", "prepare_embedding", "prepare_linear"}
    sampling = {name for name in vars(NumpySampling) if not name.startswith("_")}
    for name in Ops.__abstractmethods__ - hosts - sampling:
        assert name in vars(OnnxOps), name
    assert "logits" not in vars(NumpyOps)  # fusions remain compositions


@pytest.mark.parametrize(
    "use", [bool, len, lambda x: x[0], lambda x: x.shape, lambda x: [*x], lambda x: x + 1, lambda x: x > 1]
)
def test_symbol_has_no_value(use):
    with pytest.raises(TraceError, match="unknown during tracing"):
        use(GraphSymbol(Graph(), "x"))


def test_values_of_another_graph_and_arrays_are_rejected():
    graph, other = Graph(), Graph()
    x = graph.input("x", np.float32, (2,))
    for stranger in (other.input("x", np.float32, (2,)), np.zeros(2, np.float32)):
        with pytest.raises(TraceError, match="passes Add a value that does not belong"):
            graph.op("Add", x, stranger)


def test_weights_are_not_copied():
    weight = np.ones((64, 64), np.float32)
    graph = Graph()
    x = graph.input("x", np.float32, ("tokens", 64))
    assert graph.weight(weight).name == graph.weight(weight).name
    y = graph.op("Gemm", x, graph.weight(weight), transB=1)
    run = Session(graph, {"y": y}, CPU).bind({}).run
    assert len(graph.model({"y": y})) < weight.nbytes
    values = {"x": np.ones((3, 64), np.float32)}
    assert run(values)[0].tolist() == [[64.0] * 64] * 3
    weight[5] = 0
    assert run(values)[0][2, 4:7].tolist() == [64.0, 0.0, 64.0]


def test_fallback_to_another_provider_is_an_error(monkeypatch):
    class Falls:
        def __init__(self, *_args, **_options) -> None:
            pass

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(sessions.onnxruntime, "InferenceSession", Falls)
    graph = Graph()
    with pytest.raises(PluginError, match="CUDAExecutionProvider, got CPUExecutionProvider"):
        Session(graph, {"y": graph.input("y", np.float32, (1,))}, Provider("CUDAExecutionProvider", "cuda"))


def test_results_are_owned_by_the_caller():
    graph = Graph()
    x = graph.input("x", np.float32, ("n",))
    run = Session(graph, {"y": graph.op("Neg", x)}, CPU).bind({}).run
    (first,) = run({"x": np.ones(4, np.float32)})
    run({"x": np.zeros(4, np.float32)})
    assert first.tolist() == [-1.0] * 4
    first += 1  # penalties are applied in place
    assert first.tolist() == [0.0] * 4
