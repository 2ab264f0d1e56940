import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.disagg.ticket import read_ticket, sign_ticket

KEY = b"k" * 32
PEER = "10.0.0.7:5001"
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # includes lone surrogates


@pytest.mark.parametrize(
    "peer", [PEER, "worker-1.example.com:1", "a_b:65535", "[::1]:5001", "[fe80::1]:5001", "[::ffff:10.0.0.7]:80"]
)
def test_signed_address_round_trips(peer: str) -> None:
    assert read_ticket(KEY, "r1", sign_ticket(KEY, "r1", peer)) == peer


def test_ticket_is_bound_to_its_request() -> None:
    assert read_ticket(KEY, "r2", sign_ticket(KEY, "r1", PEER)) is None


@pytest.mark.law("6")
def test_ticket_is_bound_to_its_secret() -> None:
    assert read_ticket(b"z" * 32, "r1", sign_ticket(KEY, "r1", PEER)) is None


def test_ticket_is_bound_to_its_address() -> None:
    mac = sign_ticket(KEY, "r1", PEER).partition(";")[2]
    assert read_ticket(KEY, "r1", f"10.0.0.8:5001;{mac}") is None


@given(index=st.integers(0, 200), sign=st.characters())
def test_modified_ticket_is_invalid(index: int, sign: str) -> None:
    ticket = sign_ticket(KEY, "r1", PEER)
    index %= len(ticket)
    changed = ticket[:index] + sign + ticket[index + 1 :]
    assert (read_ticket(KEY, "r1", changed) == PEER) == (changed == ticket)


@given(ticket=ANY_TEXT)
def test_arbitrary_text_is_no_ticket(ticket: str) -> None:
    assert read_ticket(KEY, "r1", ticket) is None
    assert read_ticket(KEY, "r1", f"{PEER};{ticket}") is None


@given(one=st.tuples(ANY_TEXT, ANY_TEXT), other=st.tuples(ANY_TEXT, ANY_TEXT))
def test_request_and_address_have_a_unique_signature(one: tuple[str, str], other: tuple[str, str]) -> None:
    signatures = [sign_ticket(KEY, request, peer).rpartition(";")[2] for request, peer in (one, other)]
    assert (signatures[0] == signatures[1]) == (one == other)


def test_newline_does_not_shift_signed_fields() -> None:
    mac = sign_ticket(KEY, "r1", f"x\n{PEER}").rpartition(";")[2]
    assert read_ticket(KEY, "r1\nx", f"{PEER};{mac}") is None


@given(request=ANY_TEXT)
def test_any_request_id_can_be_signed(request: str) -> None:
    assert read_ticket(KEY, request, sign_ticket(KEY, request, PEER)) == PEER


@pytest.mark.parametrize(
    "peer",
    [
        "",
        "host",
        "host:",
        ":80",
        "host:0",
        "host:65536",
        "host:99999",
        "host:80\n",
        "host:80:80",
        "a b:80",
        "host/path:80",
        "user@host:80",
        "tcp://host:80",
        "[::1:80",
        "::1:80",
        "*:80",
        "host:\N{ARABIC-INDIC DIGIT EIGHT}0",
        "h\N{LATIN SMALL LETTER O WITH DIAERESIS}st:80",
        "h" * 254 + ":80",
    ],
)
def test_signed_invalid_address_is_rejected(peer: str) -> None:
    assert read_ticket(KEY, "r1", sign_ticket(KEY, "r1", peer)) is None


def test_oversized_ticket_is_rejected_unparsed() -> None:
    assert read_ticket(KEY, "r1", sign_ticket(KEY, "r1", PEER) + " " * 10**6) is None
