"""The onnx pack: a model's forward traced into one ONNX graph, which ONNX Runtime executes.

`graph` builds graphs from symbols, `attention` and `moe` emit what takes more than an operator or two, `kv_cache` holds
keys and values, `session` runs graphs, and `pack` is the `Ops` that models meet.
"""
