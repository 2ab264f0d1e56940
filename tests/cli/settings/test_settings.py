import json
import os

import pytest
from hypothesis import example
from hypothesis import given as drawn
from hypothesis import strategies as st

from fd_core.cli.settings.flags import API_KEY_FILE, ENGINE_FLAGS, GATEWAY_FLAGS, ROUTER_FLAGS, SERVER_FLAGS
from fd_core.cli.settings.settings import client_key, merge
from fd_core.config import EngineConfig, MediaLimits, ServerConfig, SpeculativeConfig
from fd_core.config.generation import GenerationDefaults
from fd_core.errors import ConfigError


def engine(given=None, environment=None, **more):
    return merge("smollm2", {**(given or {}), **more}, environment or {}).engine


def server(given=None, environment=None, **more):
    return merge("smollm2", {**(given or {}), **more}, environment or {}).server


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "fd.toml"
        path.write_text(text)
        return str(path)

    return write


def test_every_flag_sets_an_existing_field():
    for flag in ENGINE_FLAGS:
        assert flag.field in EngineConfig.__struct_fields__
    for flag in SERVER_FLAGS:
        assert flag.field in ServerConfig.__struct_fields__


def test_no_arguments_give_the_defaults():
    settings = merge("smollm2", {}, {})
    assert settings.engine == EngineConfig(model="smollm2")
    assert settings.server == ServerConfig()


def test_flags_override_environment_overrides_file(file):
    path = file("max-num-seqs = 1\nblock-size = 16\nport = 1000\n")
    environment = {"FD_MAX_NUM_SEQS": "2", "FD_PORT": "2000"}
    settings = merge("smollm2", {"config": path, "max_num_seqs": "3"}, environment)
    assert (settings.engine.max_num_seqs, settings.server.port, settings.engine.block_size) == (3, 2000, 16)


def test_model_may_be_given_by_each_source(file):
    path = file("model = 'from-file'")
    assert merge(None, {"config": path}, {}).engine.model == "from-file"
    assert merge(None, {"config": path}, {"FD_MODEL": "from-env"}).engine.model == "from-env"
    assert merge("typed", {"config": path}, {"FD_MODEL": "from-env"}).engine.model == "typed"
    with pytest.raises(ConfigError, match="no model was specified"):
        merge(None, {}, {})


def test_environment_may_name_the_settings_file(file):
    assert engine(environment={"FD_CONFIG": file("max_num_seqs = 7")}).max_num_seqs == 7


@pytest.mark.parametrize(
    "text, number",
    [
        ("256M", 256_000_000),
        ("1.5G", 1_500_000_000),
        ("512Mi", 512 << 20),
        ("2GiB", 2 << 30),
        ("64kB", 64_000),
        ("7", 7),
    ],
)
def test_sizes(text, number):
    assert engine(kv_cache_memory=text).kv_cache_memory == number


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("max_num_seqs", "many", "--max-num-seqs: expected an integer, got 'many'"),
        ("max_num_seqs", "0", "--max-num-seqs: 0 is out of range; expected between 1 and 65536"),
        ("max_num_seqs", "9" * 5000, "--max-num-seqs"),
        ("port", "70000", "--port: 70000 is out of range; expected between 0 and 65535"),
        ("kv_cache_memory", "lots", "--kv-cache-memory: expected a size"),
        ("kv_cache_memory", "0M", "--kv-cache-memory"),
        ("kv_cache_memory", "-1G", "--kv-cache-memory"),
        ("kv_cache_memory", "9" * 400 + "T", "--kv-cache-memory"),
        (
            "gpu_memory_utilization",
            "0",
            "--gpu-memory-utilization: 0 is out of range; expected above 0 and at most 1",
        ),
        ("gpu_memory_utilization", "nan", "--gpu-memory-utilization: expected a number, got"),
        ("dtype", "float8", "--dtype: expected one of auto, float32, bfloat16"),
        ("engine", "thread", "--engine: expected one of process, inproc"),
        ("chat_template", "/no/such/file", "--chat-template: cannot read /no/such/file: no such file"),
        ("api_key_file", "/no/such/file", "--api-key-file: cannot read"),
    ],
)
def test_bad_value_names_the_flag_and_the_limit(field, value, words):
    with pytest.raises(ConfigError, match=words) as caught:
        engine({field: value})
    assert caught.value.exit_code == 2


def test_bad_value_names_its_source(file):
    with pytest.raises(ConfigError, match="FD_MAX_NUM_SEQS: expected an integer, got 'x'"):
        engine(environment={"FD_MAX_NUM_SEQS": "x"})
    with pytest.raises(ConfigError, match=r"max-num-seqs in .*fd.toml: expected an integer, got 'x'"):
        engine(config=file("max_num_seqs = 'x'"))


@pytest.mark.parametrize(
    "text, words",
    [
        ("max-num-sequences = 3", r"unknown setting 'max-num-sequences' \(did you mean 'max-num-seqs'\?\)"),
        ("zebra = 3", "use the names of the flags"),
        ("port = ", "is not valid TOML"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", "'max-num-seqs' is duplicated"),
        ("port = true", "expected an integer, got True"),
        ("port = [1]", r"expected an integer, got \[1\]"),
        ("[server]\nport = 1", "unknown setting 'server'"),
        ("model = 3", "model in .*: expected text"),
    ],
)
def test_bad_settings_files(file, text, words):
    with pytest.raises(ConfigError, match=words):
        engine(config=file(text))


def test_missing_settings_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--config: cannot read .*nowhere.toml: no such file"):
        engine(config=str(tmp_path / "nowhere.toml"))


def test_conflicting_settings_are_rejected_naming_both():
    with pytest.raises(ConfigError, match="--num-kv-blocks and --kv-cache-memory exclude each other"):
        engine(num_kv_blocks="10", kv_cache_memory="256M")
    with pytest.raises(ConfigError, match="FD_NUM_KV_BLOCKS and FD_GPU_MEMORY_UTILIZATION exclude each other"):
        engine(environment={"FD_NUM_KV_BLOCKS": "10", "FD_GPU_MEMORY_UTILIZATION": "0.5"})


def test_flag_overrides_a_conflicting_weaker_source():
    config = engine(num_kv_blocks="10", environment={"FD_KV_CACHE_MEMORY": "256M"})
    assert (config.num_kv_blocks, config.kv_cache_memory) == (10, None)


def test_switches():
    assert engine(enable_prefix_caching=False).enable_prefix_caching is False
    assert engine(environment={"FD_ENABLE_PREFIX_CACHING": "off"}).enable_prefix_caching is False
    with pytest.raises(ConfigError, match=r"FD_ENABLE_PREFIX_CACHING: expected one of 1, true, .*, got 'perhaps'"):
        engine(environment={"FD_ENABLE_PREFIX_CACHING": "perhaps"})


def test_api_keys_are_read_from_flag_environment_and_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\n\n two \none\n")
    assert server(environment={"FD_API_KEY": "secret"}).api_keys == ("secret",)
    both = server(api_keys=["a", "b"], api_key_file=str(path))
    assert (both.api_keys, both.api_key_file) == (("a", "b"), str(path))


@pytest.mark.parametrize("source", ["flag", "environment"])
def test_client_sends_the_first_key_of_its_file_unless_given_one(tmp_path, source):
    path = tmp_path / "keys"
    path.write_text("\n one \ntwo\n")
    given, environment = {"client_keys": str(path)}, {"FD_API_KEY_FILE": str(path)}
    where = (given, {}) if source == "flag" else ({}, environment)
    assert client_key(*where) == "one"
    assert client_key({"api_keys": ["three"], **where[0]}, where[1]) == "three"
    assert client_key({}, {}) is None


def test_bad_key_file_is_rejected_before_loading(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "a"\nkey = "sk-a"\nadmin = 1\n')
    with pytest.raises(ConfigError, match=r"FD_API_KEY_FILE: .*keys.toml, line 4, admin: expected true or false"):
        server(environment={"FD_API_KEY_FILE": str(path)})


@pytest.mark.parametrize(
    "field",
    ["api_key_file", "kv_store_secret_file", "transfer_secret_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"],
)
def test_file_that_is_read_several_times_cannot_be_a_pipe(field, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is a pipe, but it is read several times; write it to a file"):
        server({field: str(tmp_path / "pipe")})


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "tab\tbed", "a\nb"])
def test_bad_key_is_rejected_without_showing_it(key):
    with pytest.raises(ConfigError, match="--api-key: ") as caught:
        server(api_keys=[key])
    assert not key or key not in str(caught.value)


def test_empty_key_file_is_rejected(tmp_path):
    path = tmp_path / "keys"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"--api-key-file: .* contains no key"):
        server(api_key_file=str(path))


def test_chat_template_is_a_file_or_a_template(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    assert server(chat_template=str(path)).chat_template == "{{ messages }}"
    assert server(chat_template="{% if x %}{% endif %}").chat_template == "{% if x %}{% endif %}"


def test_served_model_names():
    assert server(served_model_names=["a", "b"]).served_model_names == ("a", "b")
    assert server(environment={"FD_SERVED_MODEL_NAME": "a, b"}).served_model_names == ("a", "b")


@drawn(st.sampled_from((*ENGINE_FLAGS, *SERVER_FLAGS, API_KEY_FILE)), st.text(max_size=30))
def test_any_environment_value_is_parsed_or_names_its_variable(flag, text):
    try:
        merge("smollm2", {}, {flag.variable: text})
    except ConfigError as error:
        assert flag.variable in str(error)


@drawn(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
@example(10**400)
@example("[" * 100_000)
def test_every_flag_parses_or_rejects_any_value(value):
    for flag in {flag.field: flag for flag in (*ENGINE_FLAGS, *SERVER_FLAGS, *GATEWAY_FLAGS, *ROUTER_FLAGS)}.values():
        try:
            flag.parse(value)
        except (ConfigError, ValueError) as error:
            assert str(error), flag.flag


def test_speculation_is_json_or_a_table(file):
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    assert engine(speculative='{"method": "ngram", "num_speculative_tokens": 5}').speculative == expected
    table = "speculative-config = {method = 'ngram', num_speculative_tokens = 5}"
    assert engine(config=file(table)).speculative == expected


@pytest.mark.parametrize("text", ["ngram", "{}", "[]", '{"method": 3}', "[" * 100_000])
def test_bad_speculation_names_the_flag(text):
    with pytest.raises(ConfigError, match="--speculative-config: "):
        engine(speculative=text)


def test_default_sampling_parameters_are_json_or_a_table(file):
    expected = GenerationDefaults(temperature=0.5, top_k=20)
    assert engine(override_generation_config='{"temperature": 0.5, "top_k": 20}').override_generation_config == expected
    table = "override-generation-config = {temperature = 0.5, top_k = 20}"
    assert engine(config=file(table)).override_generation_config == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5", "expected an object of temperature, top_k"),
        ('{"temprature": 1}', "'temprature' is not a default sampling parameter"),
        ('{"temperature": 3}', "temperature=3: expected"),
        ('{"max_new_tokens": 0}', "max_new_tokens=0: expected"),
    ],
)
def test_bad_default_sampling_parameters_name_the_flag(text, message):
    with pytest.raises(ConfigError, match=f"--override-generation-config: .*{message}"):
        engine(override_generation_config=text)


def test_media_settings_are_texts_or_values_of_a_file(file):
    table = "limit-mm-per-prompt = {image = 4}\nallowed-media-domains = ['a.example', '*.b.example']"
    typed = {"limit_mm_per_prompt": '{"image": 4, "video": 0}', "allowed_media_domains": "a.example, *.b.example"}
    for given in (typed, {"config": file(table)}):
        found = server(**given)
        assert found.limit_mm_per_prompt == MediaLimits(image=4)
        assert found.allowed_media_domains == ("a.example", "*.b.example")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("limit_mm_per_prompt", text) for text in ("4", "{", '{"image": -1}', '{"image": "x"}')),
        *(("allowed_media_domains", text) for text in ("http://a.example", "a.example/x", "a,,b", "*")),
    ],
)
def test_bad_media_settings_name_the_flag(name, text):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: "):
        server(**{name: text})


def test_settings_file_can_hold_every_setting(file, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a secret of a cluster\n".replace(" ", "-"))
    values = {
        "router": "http://127.0.0.1:8081",
        "router-secret-file": str(secret),
        "advertise-url": "http://127.0.0.1:8001",
        "api-key-file": str(secret),
    }
    values |= {
        "api-key": ["k"],
        "health-port": 17,
        "served-model-name": ["m"],
        "dtype": "float32",
        "engine": "inproc",
        "log-level": "debug",
        "speculative-config": {"method": "ngram"},
        "generation-config": "none",
        "override-generation-config": {"temperature": 0.6, "top_k": 20},
        "limit-mm-per-prompt": {"image": 2},
        "allowed-media-domains": ["a.example"],
    }
    values |= {
        "kv-cache-memory": 1 << 20,
        "enable-prefix-caching": False,
        "chat-template": "{{ x }}",
        "trust-request-chat-template": True,
        "tool-call-parser": "hermes",
        "reasoning-parser": "qwen3",
        "drain-seconds": 1,
    }
    values |= {
        "backend": "null",
        "host": "::1",
        "revision": "r",
        "trace": "t.jsonl",
        "scheduler": "continuous",
        "scheduling-policy": "priority",
        "victim-policy": "youngest",
        "postprocess": "numpy",
        "observer": "mine",
        "output-transport": "zmq",
        "native-kernels": True,
        "structured-output": False,
        "kv-events": False,
        "save-preempted-kv": False,
        "kv-store": "disk:kv",
        "kv-store-secret-file": "secret",
        "kv-store-compression": "zlib",
        "role": "decode",
        "kv-connector": "shared_memory",
        "transfer-host": "127.0.0.1",
        "transfer-secret-file": "secret",
    }
    flags = {flag.key: flag for flag in (*ENGINE_FLAGS, *SERVER_FLAGS) if flag.key not in values}
    for key in flags.keys() - {"num-kv-blocks", "gpu-memory-utilization"}:
        words = getattr(flags[key].rule.constraint, "words", ("name",))
        values[key] = {bool: True, str: words[-1], tuple: "name"}.get(flags[key].rule.kind, 16)
    text = "\n".join(f"{key} = {_toml(value)}" for key, value in values.items())
    settings = merge("smollm2", {"config": file(text)}, {})
    assert settings.engine.pipeline_depth == 16
    assert settings.server.drain_seconds == 1.0
    assert settings.server.api_keys == ("k",)
    assert settings.server.router_secret == "a-secret-of-a-cluster"


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def test_legacy_variable_selects_the_socket_transport():
    assert merge("m", {}, {"FD_USE_GET_SAVE_OUTPUT_V1": "1"}).engine.output_transport == "zmq"
    assert merge("m", {}, {"FD_USE_GET_SAVE_OUTPUT_V1": "0"}).engine.output_transport == "memory"
    both = {"FD_USE_GET_SAVE_OUTPUT_V1": "1", "FD_OUTPUT_TRANSPORT": "memory"}
    assert merge("m", {}, both).engine.output_transport == "memory"


def test_server_with_a_router_publishes_kv_events(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-a-cluster\n")
    joins = {"router": "http://127.0.0.1:8081", "router_secret": str(secret)}
    assert engine(joins).kv_events is engine(joins, data_parallel_size=2).kv_events is True
    assert engine(joins, kv_events=False).kv_events is False
    assert engine(joins, enable_prefix_caching=False).kv_events is None
    assert engine(kv_events=True, router_secret=str(secret)).kv_events is True
    with pytest.raises(ConfigError, match="requires a secret shared with the router"):
        engine(kv_events=True)
    with pytest.raises(ConfigError, match="requires prefix caching"):
        engine(joins, kv_events=True, enable_prefix_caching=False)
