"""Every constrained setting refuses a bad value with the same words, whichever way the value comes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fd_core import LLM
from fd_core.cli.settings.flags import ENGINE_FLAGS, GATEWAY_FLAGS, ROUTER_FLAGS, SERVER_FLAGS, Flag
from fd_core.cli.settings.settings import merge, merge_route
from fd_core.config import EngineConfig, ServerConfig, SpeculativeConfig
from fd_core.config.constraints import (
    ByteSize,
    CheckedStruct,
    OneOf,
    Prefix,
    Range,
    Rule,
    make_settings,
    parse_switch,
    rules_of,
)
from fd_core.errors import ConfigError, PluginError
from fd_core.router.config import GatewayConfig, RouterConfig

SETTINGS: dict[type[CheckedStruct], tuple[Flag, ...]] = {
    EngineConfig: ENGINE_FLAGS,
    ServerConfig: SERVER_FLAGS,
    GatewayConfig: GATEWAY_FLAGS,
    RouterConfig: ROUTER_FLAGS,
}


def bad_value(rule: Rule) -> Any:
    """Return a value of the field's type that its constraint refuses."""
    match rule.constraint:
        case Range(minimum=minimum):
            return int(minimum) - 1 if rule.kind is int else minimum - 1
        case OneOf():
            return "banana"
        case ByteSize(minimum=minimum):
            return minimum - 1
        case Prefix():
            return "banana"
    raise AssertionError(f"this test does not know {rule.constraint}")


CONSTRAINED = [
    (settings, name, rule)
    for settings in (*SETTINGS, SpeculativeConfig)
    for name, rule in rules_of(settings).items()
    if rule.constraint is not None
]
REQUIRED = {EngineConfig: {"model": "m"}, SpeculativeConfig: {"method": "ngram"}}


def words(error: ConfigError) -> str:
    """Return what was said behind the name of the setting."""
    return error.message.split(": ", 1)[1]


def refused(settings: type[CheckedStruct], name: str, value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(**(REQUIRED.get(settings, {}) | {name: value}))
    assert caught.value.exit_code == 2
    assert caught.value.field is not None
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    assert caught.value.field.replace("-", "_") == name
    return words(caught.value)


@pytest.mark.parametrize("settings, name, rule", CONSTRAINED, ids=[f"{s.__name__}.{n}" for s, n, _ in CONSTRAINED])
def test_whoever_makes_the_settings_cannot_break_a_constraint(
    settings: type[CheckedStruct], name: str, rule: Rule, tmp_path: Path
) -> None:
    value = bad_value(rule)
    said = refused(settings, name, value)
    if settings is EngineConfig:
        with pytest.raises(ConfigError) as caught:
            LLM("m", **{name: value})
        assert (caught.value.field, words(caught.value)) == (name, said)
    flag = next((each for each in SETTINGS.get(settings, ()) if each.field == name and each.parser is None), None)
    if flag is None:
        return
    routes = settings in (GatewayConfig, RouterConfig)
    file = tmp_path / "settings.toml"
    file.write_text(f"{flag.key} = {json.dumps(value)}\n")
    for given, environment, called in (
        ({name: str(value)}, {}, flag.flag),
        ({}, {flag.variable: str(value)}, flag.variable),
        ({"config": str(file)}, {}, flag.key),
    ):
        with pytest.raises(ConfigError) as caught:
            merge_route(given, environment) if routes else merge("m", given, environment)
        assert called in caught.value.message
        if not isinstance(rule.constraint, ByteSize) or "config" in given:  # a size is told as it was typed
            assert said in caught.value.message


@pytest.mark.parametrize("settings", [*SETTINGS, SpeculativeConfig])
def test_a_value_of_another_type_is_refused(settings: type[CheckedStruct]) -> None:
    for name, rule in rules_of(settings).items():
        if rule.kind in (int, float, bool, str, tuple):
            assert refused(settings, name, {"a": 1})


def test_not_every_number_is_a_number() -> None:
    for value in (math.nan, math.inf, True):
        assert refused(EngineConfig, "lease_seconds", value) == f"{value!r} is not a number"
    assert refused(EngineConfig, "max_num_seqs", 3.0) == "3.0 is not a whole number"
    assert refused(EngineConfig, "role", " ") == "' ' is not a text"


def test_speculation_is_checked_within_its_table() -> None:
    with pytest.raises(ConfigError, match="--speculative-config: num_speculative_tokens: 17 is out of range"):
        merge("m", {"speculative": '{"method": "ngram", "num_speculative_tokens": 17}'}, {})
    with pytest.raises(ConfigError, match="cheap_tokens: 0 is out of range; it must be between 1 and 2147483647"):
        LLM("m", speculative={"method": "ngram", "cheap_tokens": 0})


def test_a_setting_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(
        ConfigError, match=r"there is no setting 'rolle' \(there are model, revision, backend"
    ) as caught:
        LLM("m", rolle="decode")
    assert caught.value.field == "rolle"
    with pytest.raises(ConfigError, match="there is no setting 'polcy'"):
        make_settings(RouterConfig, {"polcy": "random"})


@pytest.mark.parametrize("word", ["1", "true", "Yes", "ON", " on "])
def test_switches_understand_yes(word: str) -> None:
    assert parse_switch(word) is True


@pytest.mark.parametrize("word", ["0", "False", "no", "OFF"])
def test_switches_understand_no(word: str) -> None:
    assert parse_switch(word) is False


SWITCHES = [
    *(flag.variable for flag in ENGINE_FLAGS if flag.rule.kind is bool),
    "FD_USE_GET_SAVE_OUTPUT_V1",
    "FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST",
]


@pytest.mark.parametrize("variable", SWITCHES)
@pytest.mark.parametrize("word", ["2", "y", "enabled", "-1", "zmq"])
def test_a_switch_that_is_neither_is_refused_by_name(variable: str, word: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{variable}: '{word}' is neither true nor false; use one of 1, true"
    ) as caught:
        merge("m", {}, {variable: word})
    assert (caught.value.exit_code, caught.value.field) == (2, variable)


@pytest.mark.parametrize("word, transport", [("true", "zmq"), ("YES", "zmq"), ("off", "memory"), ("False", "memory")])
def test_the_older_switch_of_the_transport_takes_every_spelling(word: str, transport: str) -> None:
    assert merge("m", {}, {"FD_USE_GET_SAVE_OUTPUT_V1": word}).engine.output_transport == transport


@pytest.mark.parametrize(
    "setting, known",
    [
        ({"backend": "banana"}, "null"),
        ({"scheduling_policy": "banana"}, "fcfs, priority"),
        ({"victim_policy": "banana"}, "cheapest"),
        ({"kv_connector": "banana"}, "shared_memory, tcp"),
        ({"speculative": {"method": "banana"}}, "ngram, suffix"),
    ],
)
def test_a_name_that_no_plugin_offers_is_refused_with_those_that_are(setting: dict[str, Any], known: str) -> None:
    with pytest.raises(PluginError, match="called 'banana'") as caught:
        LLM("null", **({"backend": "null"} | setting))
    assert caught.value.hint is not None
    assert known in caught.value.hint
