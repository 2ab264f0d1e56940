"""The OpenAI-compatible HTTP server over an `EngineClient`.

A request passes, in this order: `gate` (request id, key), the module of its API family (`completions`, ...),
`body` (reading, decoding), `sampling` and `jobs` (prompt, checks), `generation` (engine deltas to chunks of text) and
`response_format` (chunks to bytes, the answer). `serve` owns socket, signals and drain.
"""
