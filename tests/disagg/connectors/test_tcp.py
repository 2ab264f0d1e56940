import pytest

from fd_core.disagg.connectors.contract import ConnectorError, ConnectorSettings
from fd_core.disagg.connectors.tcp import TCPConnector
from fd_core.testing.connectors import ConnectorSuite

LIMITS = {"window": 2, "value_bytes": 100}


@pytest.mark.in_turn(3)
class TestTCPConnector(ConnectorSuite):
    connector = "tcp"
    examples = 8


@pytest.mark.soak
class TestTCPConnectorAtLength(TestTCPConnector):
    examples = 25


def test_prefill_side_sends_without_copying():
    part = bytearray(b"key and value")
    outbox = TCPConnector(ConnectorSettings()).open_outbox("lease", b"", **LIMITS)
    [frame] = outbox.put(0, [part]).frames
    part[:3] = b"KEY"
    assert bytes(frame) == b"KEY and value"


def test_connector_address_is_rejected():
    with pytest.raises(ConnectorError, match="no addresses"):
        TCPConnector(ConnectorSettings()).open_outbox("lease", b"somewhere", **LIMITS)
