import pytest

from fd_core.disagg.connectors.contract import ConnectorError, ConnectorSettings
from fd_core.disagg.connectors.tcp import TCPConnector
from fd_core.testing.connectors import ConnectorSuite

LIMITS = {"window": 2, "value_bytes": 100}


class TestTCPConnector(ConnectorSuite):
    connector = "tcp"
    examples = 8


@pytest.mark.soak
class TestTCPConnectorAtLength(TestTCPConnector):
    examples = 25


def test_the_prefill_side_hands_on_the_very_memory_that_it_was_given():
    part = bytearray(b"key and value")
    outbox = TCPConnector(ConnectorSettings()).open_outbox("lease", b"", **LIMITS)
    [frame] = outbox.put(0, [part]).frames
    part[:3] = b"KEY"
    assert bytes(frame) == b"KEY and value"


def test_an_address_is_refused():
    with pytest.raises(ConnectorError, match="no addresses"):
        TCPConnector(ConnectorSettings()).open_outbox("lease", b"somewhere", **LIMITS)
