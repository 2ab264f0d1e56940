import pytest

from fd_core.errors import ConfigError
from fd_core.kv.stores.location import StoreLocation, parse_location


def test_location_has_scheme_rest_and_parameters():
    location = parse_location("disk:/var/kv?max_bytes=20Gi&x=")
    assert (location.scheme, location.rest, location.parameters) == ("disk", "/var/kv", {"max_bytes": "20Gi", "x": ""})
    assert location.size("max_bytes") == 20 << 30
    assert location.size("other") is None


@pytest.mark.parametrize(
    "text",
    ["redis://me:hunter2@host/0", "redis://:hun/ter2@host/0", "redis://me:hunter2@@host/0", "r://h/0?password=hunter2"],
)
def test_secrets_are_never_shown(text):
    location = parse_location(text)
    for shown in (location.shown, repr(location), str(location)):
        assert "ter2" not in shown
    with pytest.raises(ConfigError) as caught:
        StoreLocation(location.scheme, location.text, {"x": "hunter2"}).require_known()
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "disk", "/var/kv", ":x", "Disk:/x", "re dis://me:hunter2@host", "x?a=disk:b"])
def test_invalid_location_is_rejected_without_secrets(text):
    with pytest.raises(ConfigError, match="has no store scheme") as caught:
        parse_location(text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("query", ["", "hunter2", "a=1&hunter2", "a=1&a=2", "&"])
def test_malformed_parameters_are_rejected_without_secrets(query):
    with pytest.raises(ConfigError, match="parameters of disk:/x are malformed") as caught:
        parse_location(f"disk:/x?{query}")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["redis://me:hun?ter2@host/0", "redis://me:hun?a=ter2@host/0", "r://h/0?password=hun@ter2"]
)
def test_unescaped_password_is_rejected_without_showing_it(text):
    with pytest.raises(ConfigError, match="write %40 for an @") as caught:
        parse_location(text)
    assert "hun" not in str(caught.value) and "ter2" not in str(caught.value)


def test_unknown_parameter_and_bad_size_are_named():
    location = parse_location("disk:/x?max_bites=1")
    with pytest.raises(ConfigError, match=r"disk:/x has no parameter 'max_bites' \(valid parameters: max_bytes\)"):
        location.require_known("max_bytes")
    with pytest.raises(ConfigError, match="max_bites of disk:/x: '0' is not a valid size above 0"):
        parse_location("disk:/x?max_bites=0").size("max_bites")
