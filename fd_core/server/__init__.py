"""The OpenAI-compatible HTTP server over an `EngineClient`.

A request passes, in this order: `gate` (request id, key), the module of its API family (`completions`, `chat`, ...),
`body` (reading, decoding), `sampling` and `prompts` (checks), `generation` (engine deltas to chunks of text) and
`streaming` or `collecting` (chunks to bytes). `serve` owns socket, signals and drain.
"""
