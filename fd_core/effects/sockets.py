"""ZeroMQ sockets for messages between machines: those of transfers, and of the ranks of one model.

A process and its child use `fd_core.launching.message_stream`. Ranks use ZeroMQ on one machine, too: their
launcher may start them on others, which takes CURVE, and their standard input is the launcher's, so that the stream
would be a second transport for the same purpose. It would save little of a step, which takes milliseconds: a plan of
5 kB and the digest that answers it take 80 us over ZeroMQ, 120 us with CURVE, and 39 us over the stream (medians of
3,000 between two processes on one machine).
"""

from __future__ import annotations

import zmq

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
Endpoint = tuple[str, bool]
"""Address that a socket binds or connects to, and True if it is IPv6: for `Socket.ipv6`."""


def open_socket(context: Context, kind: int) -> Socket:
    """Return a socket that queues all messages, which the callers bound, and drops the rest when it is closed."""
    opened = context.socket(kind)
    opened.sndhwm = 0
    opened.linger = 0
    return opened


def tcp_endpoint(address: str, port: int | str) -> Endpoint:
    """Return the endpoint of a numeric address, `*` for any port."""
    six = ":" in address
    return (f"tcp://[{address}]:{port}" if six else f"tcp://{address}:{port}"), six
