"""Connectors: transfer of sealed pieces of KV from the memory of a prefill worker to that of a decode worker."""
