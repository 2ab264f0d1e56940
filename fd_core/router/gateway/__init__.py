"""The gateway: HTTP in front of several workers.

A request passes, in this order: `gate` (id, key), `route_requests` (prompt, tokens), `forwarding` (one attempt after
the other, each under a `Selection`) and `relaying` (streams a worker's answer to the client).
`health_checks` determines which workers are healthy and what they hold, `gate` lets them register, `serving` owns
sockets and drain.

All choosing and all accounting of load is the router's.
"""
