"""The onnx pack: a model's forward traced into one ONNX graph, which ONNX Runtime executes.

`graph` builds graphs from symbols, `attention` emits what takes more than an operator or two, `session` runs graphs on
weights, keys and values, and `pack` is the `Ops` that models meet.
"""
