"""Every constrained setting rejects a bad value with the same message, from any source."""

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
from fd_core.ops.contract import KV_TYPES
from fd_core.router.config import GatewayConfig, RouterConfig

SETTINGS: dict[type[CheckedStruct], tuple[Flag, ...]] = {
    EngineConfig: ENGINE_FLAGS,
    ServerConfig: SERVER_FLAGS,
    GatewayConfig: GATEWAY_FLAGS,
    RouterConfig: ROUTER_FLAGS,
}


def bad_value(rule: Rule) -> Any:
    """Return a value of the field's type that violates its constraint."""
    match rule.constraint:
        case Range(minimum=minimum):
            return int(minimum) - 1 if rule.kind is int else minimum - 1
        case OneOf():
            return "banana"
        case ByteSize(minimum=minimum):
            return minimum - 1
        case Prefix():
            return "banana"
    raise AssertionError(f"no bad value defined for {rule.constraint}")


CONSTRAINED = [
    (settings, name, rule)
    for settings in (*SETTINGS, SpeculativeConfig)
    for name, rule in rules_of(settings).items()
    if rule.constraint is not None
]
REQUIRED = {EngineConfig: {"model": "m"}, SpeculativeConfig: {"method": "ngram"}}


def words(error: ConfigError) -> str:
    """Return the message without the name of the setting."""
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
def test_constraint_holds_for_every_source_of_settings(
    settings: type[CheckedStruct], name: str, rule: Rule, tmp_path: Path
) -> None:
    value = bad_value(rule)
    message = refused(settings, name, value)
    if settings is EngineConfig:
        with pytest.raises(ConfigError) as caught:
            LLM("m", **{name: value})
        assert (caught.value.field, words(caught.value)) == (name, message)
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
        if not isinstance(rule.constraint, ByteSize) or "config" in given:  # the message quotes a size as typed
            assert message in caught.value.message


@pytest.mark.parametrize("settings", [*SETTINGS, SpeculativeConfig])
def test_value_of_wrong_type_is_rejected(settings: type[CheckedStruct]) -> None:
    for name, rule in rules_of(settings).items():
        if rule.kind in (int, float, bool, str, tuple):
            assert refused(settings, name, {"a": 1})


def test_nan_inf_bool_and_fraction_are_not_numbers() -> None:
    for value in (math.nan, math.inf, True):
        assert refused(EngineConfig, "lease_seconds", value) == f"expected a number, got {value!r}"
    assert refused(EngineConfig, "max_num_seqs", 3.0) == "expected an integer, got 3.0"
    assert refused(EngineConfig, "kv_cache_memory", "40M") == "expected an integer of bytes, got '40M'"
    assert refused(EngineConfig, "role", " ") == "expected text, got ' '"


def test_speculative_settings_are_validated() -> None:
    with pytest.raises(ConfigError, match="--speculative-config: num_speculative_tokens: 17 is out of range"):
        merge("m", {"speculative": '{"method": "ngram", "num_speculative_tokens": 17}'}, {})
    with pytest.raises(ConfigError, match="cheap_tokens: 0 is out of range; expected between 1 and 2147483647"):
        LLM("m", speculative={"method": "ngram", "cheap_tokens": 0})


def test_unknown_setting_is_rejected_with_known_settings() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'rolle' \(did you mean 'role'\?\)") as caught:
        LLM("m", rolle="decode")
    assert caught.value.field == "rolle"
    with pytest.raises(ConfigError, match=r"unknown setting 'seed' \(use one of model, revision, model_impl, language"):
        LLM("m", seed=1)
    with pytest.raises(ConfigError, match="unknown setting 'polcy'"):
        make_settings(RouterConfig, {"polcy": "random"})


@pytest.mark.parametrize("word", ["1", "true", "Yes", "ON", " on "])
def test_switch_accepts_true_spellings(word: str) -> None:
    assert parse_switch(word) is True


@pytest.mark.parametrize("word", ["0", "False", "no", "OFF"])
def test_switch_accepts_false_spellings(word: str) -> None:
    assert parse_switch(word) is False


SWITCHES = [
    *(flag.variable for flag in ENGINE_FLAGS if flag.rule.kind is bool),
    "FD_USE_GET_SAVE_OUTPUT_V1",
    "FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST",
]


@pytest.mark.parametrize("variable", SWITCHES)
@pytest.mark.parametrize("word", ["2", "y", "enabled", "-1", "zmq"])
def test_invalid_switch_value_is_rejected_by_name(variable: str, word: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}: expected one of 1, true, .*, got '{word}'") as caught:
        merge("m", {}, {variable: word})
    assert (caught.value.exit_code, caught.value.field) == (2, variable)


@pytest.mark.parametrize("word, transport", [("true", "zmq"), ("YES", "zmq"), ("off", "memory"), ("False", "memory")])
def test_legacy_transport_switch_accepts_every_spelling(word: str, transport: str) -> None:
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
def test_unknown_plugin_name_is_rejected_with_known_names(setting: dict[str, Any], known: str) -> None:
    with pytest.raises(PluginError, match="'banana'") as caught:
        LLM("null", **({"backend": "null"} | setting))
    assert caught.value.hint is not None
    assert known in caught.value.hint


def test_every_dtype_of_kv_can_be_set():
    assert rules_of(EngineConfig)["kv_cache_dtype"].constraint.words == ("auto", *KV_TYPES)
