"""The gateway: HTTP in front of several workers.

A request passes, in this order: `gate` (id, key), `route_requests` (prompt, tokens), `forwarding` (one attempt after
the other, each under a `Selection`) and `relaying` (streams a worker's answer to the client). `health_checks`
determines the healthy workers and their cached blocks, `gate` lets workers register, `serving` owns sockets and drain.

`fd_core.router.router` makes all choices and accounts for the load.
"""
