"""The OpenAI-compatible HTTP server over an `EngineClient`.

A request passes, in this order: `gate` (request id, key), the module of its API family (`completions`, `chat`, ...),
`body` (reading, decoding), `prompts`, `sampling` and `jobs` (checks), `generation` (engine deltas to chunks of text),
`response_format` (chunks to bytes) and `streaming` (the answer). `serve` owns socket, signals and drain.
"""
