"""The onnx pack: a model's forward traced into one ONNX graph, which ONNX Runtime executes.

`graph` builds graphs from symbols, `attention` emits KV writes and attention, `session` runs graphs on weights, keys
and values, and `pack` implements `Ops`.
"""
