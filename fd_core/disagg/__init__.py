"""Prefill and decode on different workers: the lease handshake, and how KV gets from one to the other.

A decode worker reserves slot and blocks for a request and leases them to a prefill worker, which computes the prompt
and writes its KV there, piece by piece while it still computes. `terms` says which workers fit together, `messages`
what they say, `lease`, `decode_lease` and `prefill_lease` when a lease begins, goes on and ends (pure), `connectors`
how bytes travel, `receiver` and `sender` perform it all on a thread of their own on either side, and `ticket` is how a
router names one to the other.
"""
