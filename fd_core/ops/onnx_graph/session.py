"""ONNX Runtime sessions: weights and KV are used in place, and results are numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from fd_core.errors import PluginError
from fd_core.ops.contract import Heads, KVShape
from fd_core.ops.onnx_graph.graph import Graph, GraphSymbol

_ERRORS_ONLY = 3
"""Log level that suppresses warnings meant for hand-written graphs, such as shapes unknown before a run."""

Values = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider of ONNX Runtime and the device of its arrays."""

    name: str
    """For example `CPUExecutionProvider`."""
    device: str
    """`cpu` or `cuda`."""
    threads: int = 1

    def place(self, array: npt.NDArray[Any]) -> Any:
        """Return an OrtValue on the device; on the host it shares the array's memory."""
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, self.device)


CPU = Provider("CPUExecutionProvider", "cpu")


class Session:
    """A graph that is ready to run. One thread at a time."""

    def __init__(self, graph: Graph, outputs: Mapping[str, GraphSymbol], provider: Provider) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = provider.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        # Memory patterns are cached per combination of shapes, which would grow without bound in a server.
        options.enable_mem_pattern = False
        self._session = onnxruntime.InferenceSession(graph.model(dict(outputs)), options, providers=[provider.name])
        taken = self._session.get_providers()[0]
        if taken != provider.name:
            raise PluginError(
                f"expected the ONNX Runtime provider {provider.name}, got {taken}",
                hint="install the onnxruntime distribution for the device",
            )
        # The runtime neither copies nor packs inputs of a graph. Packed weights would need twice the memory; they
        # decode batches about 1.4 times as fast and single rows no faster.
        self._weights = {name: provider.place(array) for name, array in graph.weights.items()}

    def bind(self, in_place: Mapping[str, Any]) -> Binding:
        """Bind OrtValues that runs modify in place, by input names; `TracedCache.outputs` names the outputs."""
        return Binding(self._session, self._weights, in_place)


class Binding:
    """A session bound to memory that its runs modify, such as one KV cache."""

    def __init__(
        self, session: onnxruntime.InferenceSession, weights: Mapping[str, Any], in_place: Mapping[str, Any]
    ) -> None:
        self._session = session
        self._held = (weights, in_place)  # the runtime holds no reference to the memory of arrays
        self._inputs = frozenset(value.name for value in session.get_inputs())
        outputs = [value.name for value in session.get_outputs()]
        self._binding = session.io_binding()
        for name, value in weights.items():
            self._binding.bind_ortvalue_input(name, value)
        order = []
        for name, value in in_place.items():
            if name in self._inputs:
                self._binding.bind_ortvalue_input(name, value)
            for output in outputs:
                if output.startswith(f"{name}_after_"):
                    # Same memory as the input, so the runtime's ScatterND writes in place without a copy.
                    self._binding.bind_ortvalue_output(output, value)
                    order.append(output)
        self._results = [name for name in outputs if name not in order]
        self._in_place = len(order)

    def run(self, values: Values) -> tuple[npt.NDArray[Any], ...]:
        """Run once and return the unbound outputs; values that the graph does not use are ignored."""
        given = {name: np.ascontiguousarray(array) for name, array in values.items() if name in self._inputs}
        for name, array in given.items():
            self._binding.bind_cpu_input(name, array)
        for name in self._results:
            self._binding.bind_output(name)
        self._session.run_with_iobinding(self._binding)
        return tuple(value.numpy() for value in self._binding.get_outputs()[self._in_place :])


_PARTS = ("keys", "values")


def bound(layers: Sequence[npt.NDArray[np.float32]]) -> dict[str, Any]:
    """Return OrtValues over layers of the numpy pack's cache, by input: operators of a `TracedCache` modify them."""
    wrap = onnxruntime.OrtValue.ortvalue_from_numpy
    return {
        f"{part}_{index}": wrap(memory)
        for index, layer in enumerate(layers)
        for part, memory in zip(_PARTS, layer, strict=False)  # a latent cache has keys only
    }


PlanKey = tuple[int, int | None, bool]
"""Group of layers, whose block tables an attention reads, window, and True if it is the size of chunks."""


@dataclass(slots=True)
class TracedLayer:
    """One layer in a graph: the symbols of its keys and values after the operators so far."""

    keys: GraphSymbol
    values: GraphSymbol
    shape: KVShape
    plans: dict[PlanKey, Heads]
    """Of all attention operators so far, the heads of one of each kind; see `attention.plans`."""
    written: list[dict[str, GraphSymbol]] = field(default_factory=list)
    """Keys and values after each write."""


class TracedCache:
    """KV cache during tracing: layers whose symbols change as the forward writes."""

    def __init__(self, graph: Graph, shape: KVShape) -> None:
        self.shape = shape
        self.plans: dict[PlanKey, Heads] = {}
        sizes = ("blocks", shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._layers = [
            TracedLayer(
                graph.input(f"keys_{index}", np.float32, sizes),
                graph.input(f"values_{index}", np.float32, sizes),
                shape,
                self.plans,
            )
            for index in range(shape.num_layers)
        ]

    def layer(self, index: int) -> TracedLayer:
        """Return a layer."""
        return self._layers[index]

    def outputs(self) -> dict[str, GraphSymbol]:
        """Return the keys and values after each write of the forward.

        Layers of several groups write to the same memory one after the other. If a write were not an output, the
        runtime would give it other memory and copy all blocks, and what was imported meanwhile would be lost.
        """
        return {
            f"{part}_{index}_after_{number}": symbol
            for index, layer in enumerate(self._layers)
            for number, symbols in enumerate(layer.written)
            for part, symbol in symbols.items()
        }
