"""Connectors: how a sealed piece of KV gets from the memory of a prefill worker into that of a decode worker."""
