"""An engine's process imports its framework without collections of garbage, and loads and serves with them."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from fd_core.config import EngineConfig
from fd_core.engine.process.messages import EngineMessage, Fault, Start
from fd_core.launching.child import child_socket
from fd_core.launching.message_stream import MessageStream

CHILD = """
import gc, sys
from fd_core.backends.null import NullBackend
from fd_core.engine.process import child
from fd_core.errors import ConfigError
states = []
def load(*_, **__):
    raise ConfigError(str([*states, gc.isenabled()]))
NullBackend.import_framework = lambda: states.append(gc.isenabled())
child.load_engine = load
sys.exit(child.main("null"))
"""


def test_garbage_is_collected_once_the_framework_is_imported() -> None:
    with child_socket() as (own, theirs):
        process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=theirs)
    stream = MessageStream(own)
    try:
        stream.send(msgspec.msgpack.encode(Start(EngineConfig(model="null", backend="null"), None, 1)))
        message = msgspec.msgpack.decode(next(iter(stream)), type=EngineMessage)
        assert isinstance(message, Fault) and message.message == "[False, True]"
    finally:
        stream.close()
        process.wait(timeout=60)
