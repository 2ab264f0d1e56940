"""Prefill and decode on different workers: the lease handshake, and the transfer of KV between workers.

A decode worker reserves a slot and blocks for a request and leases the blocks to a prefill worker, which computes the
prompt and sends its KV block by block while it still computes.

- `decode` and `prefill` are the two sides, each in three files: the lease as a pure state machine, the connections, and
  the port to the engine with its thread. `transfer` is the code that the two ports share.
- `messages` defines the messages between the sides, `wire` seals messages and pieces, `kv_compatibility` checks which
  workers are compatible, `lease` is the code of both state machines, `links` delivers messages to the peer, and
  `connectors` move the bytes of KV.
- `ticket` names a prefill worker to a decode worker for a router, `keys` derives keys from their common secret.
"""
