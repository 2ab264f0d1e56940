"""Builder of ONNX graphs: operators take and return symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from fd_core.ops.symbol import UnknownArray

_OPSET = 23
"""Opset; the first with `Attention`, `RMSNormalization` and `RotaryEmbedding`."""
_IR_VERSION = 10
_EMBEDDED = 1024
"""Bytes up to which a constant is stored in the graph, where optimizers see its value."""


class TraceError(Exception):
    """A forward used a symbolic array in an unsupported way."""


class GraphSymbol(UnknownArray):
    """Symbolic value of a graph under construction, passed between operations."""

    __slots__ = ("graph", "name")

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph = graph
        self.name = name

    def _refuse(self, what: str) -> NoReturn:
        raise TraceError(f"the forward uses {what} of an array, which is unknown during tracing")

    def _operator(self, *others: Any) -> NoReturn:
        self._refuse("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __matmul__ = _operator


class Graph:
    """An ONNX graph under construction.

    Weights are inputs, bound once to their existing memory (see `session`): initializers would be copied into the
    protobuf, which is limited to 2 GB, or by the runtime. So the graph of any model is small.
    """

    def __init__(self) -> None:
        self.weights: dict[str, npt.NDArray[Any]] = {}
        """Inputs of every run, by name."""
        self._names: dict[int, GraphSymbol] = {}
        self._kept: list[Any] = []
        self._made: dict[Any, GraphSymbol] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: dict[str, onnx.ValueInfoProto] = {}
        self._initializers: list[onnx.TensorProto] = []
        self._count = 0

    def input(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int | str | None]) -> GraphSymbol:
        """Declare an input; a dimension is a number, the name of one, or None for any. Unused ones are dropped."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self._inputs[name] = helper.make_tensor_value_info(name, kind, shape)
        return GraphSymbol(self, name)

    def weight(self, array: npt.NDArray[Any]) -> GraphSymbol:
        """Return the symbol of an array that outlives the graph and is not copied; each array is registered once."""
        if id(array) not in self._names:
            self._kept.append(array)  # even if it is copied: the id of a freed array may be reused
            if array.nbytes <= _EMBEDDED:
                self._names[id(array)] = self.constant(array)
            else:
                name = f"weight_{len(self.weights)}"
                self._names[id(array)] = self.input(name, array.dtype, array.shape)
                self.weights[name] = array
        return self._names[id(array)]

    def constant(self, values: Any, dtype: npt.DTypeLike | None = None) -> GraphSymbol:
        """Return a small constant, stored in the graph."""
        name = self._name()
        self._initializers.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return GraphSymbol(self, name)

    def integers(self, *values: int) -> GraphSymbol:
        """Return a constant int64[len(values)] for shapes, axes and sizes."""
        return self.once(("integers", values), lambda: self.constant(values, np.int64))

    def op(self, kind: str, *inputs: GraphSymbol | None, **attributes: Any) -> GraphSymbol:
        """Append an operator with one output; None omits an optional input or attribute."""
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, outputs: int, *inputs: GraphSymbol | None, **attributes: Any) -> tuple[GraphSymbol, ...]:
        """Append an operator with several outputs."""
        names = []
        for value in inputs:
            if value is not None and (not isinstance(value, GraphSymbol) or value.graph is not self):
                raise TraceError(f"the forward passes {kind} a value that does not belong to the graph")
            names.append("" if value is None else value.name)
        results = [self._name() for _ in range(outputs)]
        given = {name: value for name, value in attributes.items() if value is not None}
        self._nodes.append(helper.make_node(kind, names, results, **given))
        return tuple(GraphSymbol(self, name) for name in results)

    def reshape(self, x: GraphSymbol, *shape: int) -> GraphSymbol:
        """Change the shape; 0 keeps a dimension and -1 infers it."""
        return self.op("Reshape", x, self.integers(*shape))

    def columns(self, x: GraphSymbol, begin: int, end: int, axis: int = -1) -> GraphSymbol:
        """Return a slice along an axis; negative numbers count from its end, and `end` 0 is the end."""
        return self.op("Slice", x, *(self.integers(each) for each in (begin, end or 2**31, axis)))

    def once(self, key: Any, make: Callable[[], GraphSymbol]) -> GraphSymbol:
        """Return the cached value of `key`, created on first use; used to share the metadata of a step between
        layers."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def model(self, outputs: dict[str, GraphSymbol]) -> bytes:
        """Return the serialized model with the outputs under their names."""
        # An `Identity` per output might copy a KV cache, so the operators' outputs are renamed.
        final = {symbol.name: name for name, symbol in outputs.items()}
        for node in self._nodes:
            node.input[:] = [final.get(name, name) for name in node.input]
            node.output[:] = [final.get(name, name) for name in node.output]
        used = {name for node in self._nodes for name in node.input}
        graph = helper.make_graph(
            self._nodes,
            "fd_core",
            [info for name, info in self._inputs.items() if name in used],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            initializer=self._initializers,
        )
        opsets = [helper.make_opsetid("", _OPSET)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION).SerializeToString())

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"
