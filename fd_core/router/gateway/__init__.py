"""The gateway: HTTP in front of several workers.

A request passes, in this order: `gate` (id, key), `route_requests` (prompt, tokens), `forwarding` (one attempt after
the other, each under the guards of a `Selection`) and `relaying` (a worker's answer to the client, as it comes).
`checking` asks workers how they are, `kv_events` what they hold, `admin` lets them register, `pages` shows everything,
`serving` owns sockets and drain.

All choosing and all accounting is the router's; nothing is counted here that could leak.
"""
