"""Prefill and decode on different workers: the lease handshake, and how KV gets from one worker to the other.

A decode worker reserves a slot and blocks for a request and leases the blocks to a prefill worker, which computes the
prompt and sends its KV block by block while it still computes.

- `decode` and `prefill` are the two sides, each in three files: the lease as a pure machine, the connections, and the
  port to the engine with the thread behind it. `transfer` is what the two ports share.
- `messages` is what the sides say to each other, `wire` how messages and pieces are sealed, `kv_compatibility` which
  workers fit together, `lease` what both machines share, `links` how what is said reaches the other side, and
  `connectors` how the bytes of KV travel.
- `ticket` is how a router names a prefill worker to a decode worker, `keys` what they derive from their common secret.
"""
