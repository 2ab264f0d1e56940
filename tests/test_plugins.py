import sys

import pytest

from fd_core.errors import PluginError
from fd_core.hookspecs import ENTRY_POINT_GROUP
from fd_core.plugins import (
    BACKEND,
    CONNECTOR,
    DRAFTER,
    LAUNCHER,
    MODEL,
    REASONING_PARSER,
    ROUTER_POLICY,
    SCALING_POLICY,
    SCHEDULER,
    SCHEDULING_POLICY,
    STORE,
    TOOL_PARSER,
    VICTIMS,
    Plugins,
)
from tests.plugin_sites import GOOD, Site


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]


def test_built_ins_are_registered_like_plugins():
    plugins = Plugins.discover([])
    assert set(plugins.offered(BACKEND)) == {"cpu", "cpu+onnx", "cpu+paddle", "reference", "null"}
    assert set(plugins.offered(MODEL)) >= {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3", "ernie4_5"}
    assert set(plugins.offered(SCHEDULER)) == {"continuous"}
    assert set(plugins.offered(SCHEDULING_POLICY)) == {"fcfs", "priority", "fair"}
    assert set(plugins.offered(VICTIMS)) == {"cheapest", "youngest"}
    assert set(plugins.offered(DRAFTER)) == {"ngram", "suffix", "draft_model", "eagle3", "mtp"}
    assert set(plugins.offered(STORE)) == {"disk", "memory"}
    assert set(plugins.offered(CONNECTOR)) == {"tcp", "shared_memory", "kv_store"}
    assert set(plugins.offered(LAUNCHER)) == {"spawn"}
    assert set(plugins.offered(SCALING_POLICY)) == {"load"}
    assert set(plugins.offered(ROUTER_POLICY)) == {
        *("random", "round_robin", "power_of_two", "request_num", "process_tokens", "metrics_score"),
        *("cache_aware", "prefix_hash", "session"),
    }
    tool_parsers = {"hermes", "ernie45", "llama3_json", "pythonic", "mistral", "deepseek", "glm45", "gpt_oss"}
    assert set(plugins.offered(TOOL_PARSER)) >= tool_parsers | {
        "qwen3_coder",
        "deepseek_v31",
        "openai",
        "llama4_pythonic",
    }
    assert set(plugins.offered(REASONING_PARSER)) >= {"qwen3", "deepseek_r1", "ernie45", "mistral", "gpt_oss", "glm45"}
    assert not plugins.problems
    assert {registered.origin.distribution for registered in plugins.offered(BACKEND).values()} == {"fd-core"}


def test_plugin_is_found_through_its_entry_point(site):
    site.chip("fd-mychip", offers="mychip")
    plugins = site.discover()
    assert plugins.load(BACKEND, "mychip").__name__ == "Chip"
    assert str(plugins.offered(BACKEND)["mychip"].origin) == "fd-mychip 2.5"


def test_discovery_does_not_import_the_classes(site):
    site.chip("fd-mychip", offers="mychip")
    site.discover()
    assert "fd_mychip" in sys.modules
    assert "fd_mychip_parts" not in sys.modules


BROKEN = {
    "import error": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "raises at import": ("raise ValueError('half installed')", "ValueError: half installed"),
    "exits at import": ("import sys; sys.exit('bye')", "SystemExit: bye"),
    "an older contract": ("FD_CONTRACT = 0", "built for contract 0; this fd_core implements 1"),
    "another contract": ("FD_CONTRACT = 99", "built for contract 99; this fd_core implements 1"),
    "a contract that equals one": ("FD_CONTRACT = True", "built for contract True"),
    "no contract": ("x = 1", "declares no FD_CONTRACT"),
    "unknown hook": (
        "from fd_core.hookspecs import hookimpl\nFD_CONTRACT = 1\n@hookimpl\ndef fd_register_toasters(): ...",
        "fd_register_toasters is not a hook; the hooks are fd_register_backends",
    ),
    "unknown hook without mark": ("FD_CONTRACT = 1\ndef fd_register_toasters(): ...", "fd_register_toasters is not"),
    "unknown marked function": (
        "from fd_core.hookspecs import hookimpl\nFD_CONTRACT = 1\n@hookimpl\ndef register(): ...",
        "register is not a hook",
    ),
    "mark forgotten": ("FD_CONTRACT = 1\ndef fd_register_backends(): return []", "is not marked with"),
    "argument that the hook has not": (
        "from fd_core.hookspecs import hookimpl\nFD_CONTRACT = 1\n@hookimpl\ndef fd_register_backends(app): ...",
        "fd_register_backends",
    ),
    "hook raises": (
        "from fd_core.hookspecs import hookimpl\nFD_CONTRACT = 1\n@hookimpl\ndef fd_register_backends(): 1 / 0",
        "ZeroDivisionError: division by zero",
    ),
}

ANSWERS = {
    "a class": ("[int]", "fd_register_backends: expected an Entry in the sequence, got type <class 'int'>"),
    "a string": ("'mychip'", "fd_register_backends: expected a sequence of Entry, got str 'mychip'"),
    "a number": ("3", "expected a sequence of Entry, got int 3"),
    "a bad name": ("[Entry('My Chip', 'a:B', '')]", "name 'My Chip' must consist of lower case"),
    "a bad target": ("[Entry('mychip', 'a.b', '')]", "target of mychip: expected package.module:Class, got 'a.b'"),
    "a bad summary": ("[Entry('mychip', 'a:B', None)]", "summary of mychip: expected one line, got NoneType None"),
}
for _what, (_answer, _cause) in ANSWERS.items():
    BROKEN[f"answers {_what}"] = (
        "from fd_core.hookspecs import Entry, hookimpl\nFD_CONTRACT = 1\n"
        f"@hookimpl\ndef fd_register_backends(): return {_answer}",
        _cause,
    )


@pytest.mark.parametrize("source, cause", BROKEN.values(), ids=BROKEN)
def test_broken_plugin_fails_only_when_named(site, source, cause):
    site.install("fd-mychip", source)
    site.chip("fd-other", offers="other")
    plugins = site.discover()
    (problem,) = plugins.problems
    assert cause in problem.cause
    assert "other" in plugins.offered(BACKEND)
    assert "mychip" not in plugins.offered(BACKEND)
    for ask in ("mychip", "mychip+paddle"):
        with pytest.raises(PluginError) as caught:
            plugins.load(BACKEND, ask)
        assert "fd-mychip" in str(caught.value)
        assert cause in str(caught.value)
        assert caught.value.exit_code == 4


def test_entry_point_must_name_a_module(site):
    site.install("fd-mychip", "FD_CONTRACT = 1\nclass Plugin: ...")
    info = site.folder / "fd_mychip-2.5.dist-info" / "entry_points.txt"
    info.write_text(f"[{ENTRY_POINT_GROUP}]\nmychip = fd_mychip:Plugin\n")
    (problem,) = site.discover().problems
    assert "must be a module" in problem.cause


def test_duplicate_name_is_given_to_neither_plugin(site):
    site.chip("fd-one", offers="chip")
    site.chip("fd-two", offers="chip")
    plugins = site.discover()
    assert "chip" not in plugins.offered(BACKEND)
    with pytest.raises(PluginError, match=r"offered by fd-one and fd-two \(uninstall one"):
        plugins.load(BACKEND, "chip")


def test_plugin_cannot_replace_a_built_in(site):
    site.chip("fd-evil", offers="cpu", rank=1000)
    plugins = site.discover()
    with pytest.raises(PluginError, match="offered by fd-core and fd-evil"):
        plugins.load(BACKEND, "cpu")


def test_unknown_name_lists_the_available_ones():
    with pytest.raises(
        PluginError, match=r"unknown backend 'tpu' \(available: cpu, cpu\+onnx, cpu\+paddle, null, reference\)"
    ):
        Plugins.discover([]).load(BACKEND, "tpu")
    with pytest.raises(PluginError, match="unknown scheduling policy 'lifo'"):
        Plugins.discover([]).load(SCHEDULING_POLICY, "lifo")


def test_missing_known_plugin_names_its_install_command():
    with pytest.raises(PluginError, match="`fdcore install gpu_cuda`"):
        Plugins.discover([]).load(BACKEND, "gpu_cuda+paddle")


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix", "valkey", "redis+sentinel", "rediss+cluster"])
def test_scheme_of_a_missing_plugin_names_its_install_command(scheme):
    with pytest.raises(PluginError, match="`fdcore install storage_redis`") as caught:
        Plugins.discover([]).load(STORE, scheme)
    assert caught.value.exit_code == 4


def test_connector_of_a_missing_plugin_names_its_install_command():
    with pytest.raises(PluginError, match="`fdcore install connector_nixl`"):
        Plugins.discover([]).load(CONNECTOR, "nixl")


def test_scheme_of_a_broken_plugin_reports_the_cause(site, monkeypatch):
    monkeypatch.delitem(sys.modules, "fd_storage_redis", raising=False)  # the real one, where it is installed
    site.install("fd-storage-redis", "FD_CONTRACT = 99")
    with pytest.raises(PluginError, match="contract 99"):
        site.discover().load(STORE, "redis+unix")


def test_target_of_the_wrong_kind_is_rejected(site):
    site.install("fd-mychip", GOOD.format(name="mychip", module="fd_mychip"), parts="class Chip: ...")
    with pytest.raises(PluginError, match=r"fd_mychip_parts:Chip is not a subclass of .*Backend"):
        site.discover().load(BACKEND, "mychip")


def test_target_that_cannot_be_imported_names_distribution_and_cause(site):
    site.install("fd-mychip", GOOD.format(name="mychip", module="fd_mychip"), parts="import no_driver")
    with pytest.raises(PluginError, match=r"backend mychip of plugin fd-mychip 2.5 .*No module named 'no_driver'"):
        site.discover().load(BACKEND, "mychip")


def test_auto_selects_the_highest_available_rank_and_reports_why(site):
    site.chip("fd-fast", offers="fast", rank=900, answer="Availability(False, 'no such device')")
    site.chip("fd-slow", offers="slow", rank=800)
    choice = site.discover().choose_backend("auto")
    assert choice.name == "slow"
    assert "it is here" in choice.reason
    assert "fast: no such device" in choice.reason


def test_auto_skips_a_backend_whose_probe_fails(site):
    site.chip("fd-fast", offers="fast", rank=900, answer="1 / 0")
    site.chip("fd-odd", offers="odd", rank=850, answer="True")
    site.chip("fd-slow", offers="slow", rank=800)
    choice = site.discover().choose_backend()
    assert choice.name == "slow"
    assert "ZeroDivisionError" in choice.reason
    assert "probe: expected an Availability, got bool True" in choice.reason


def test_auto_never_selects_a_negative_rank(site):
    site.chip("fd-shy", offers="shy", rank=-1)
    plugins = site.discover()
    for name in ("cpu", "cpu+onnx", "cpu+paddle", "reference", "null"):
        del plugins._offers[plugins.offered(BACKEND)[name].kind][name]
    with pytest.raises(PluginError, match="no backend can run here"):
        plugins.choose_backend("auto")
    assert plugins.choose_backend("shy").name == "shy"


def test_auto_never_selects_an_emulated_backend(site):
    answer = "Availability(True, 'emulated: no such device', emulated=True)"
    site.chip("fd-fast", offers="fast", rank=900, answer=answer)
    site.chip("fd-slow", offers="slow", rank=800)
    plugins = site.discover()
    choice = plugins.choose_backend("auto")
    assert choice.name == "slow"
    assert "not fast: emulated: no such device" in choice.reason
    assert plugins.choose_backend("fast").reason == "selected by name; emulated: no such device"


def test_named_backend_that_cannot_run_is_an_error_with_the_reason(site):
    site.chip("fd-mychip", offers="mychip", answer="Availability(False, 'driver 3 is too old')")
    with pytest.raises(PluginError, match="backend mychip cannot run here: driver 3 is too old"):
        site.discover().choose_backend("mychip")


def test_auto_reports_unusable_plugins(site):
    site.install("fd-mychip", "import no_driver")
    site.chip("fd-slow", offers="slow", rank=800)
    assert "fd-mychip" in site.discover().choose_backend("auto").reason


def test_router_policies_are_registered_the_same_way(site):
    hook = "@hookimpl\ndef fd_register_router_policies(): return [Entry('first', 'fd_first_parts:First', 'the first')]"
    site.install(
        "fd-first",
        f"from fd_core.hookspecs import Entry, hookimpl\nFD_CONTRACT = 1\n{hook}",
        parts="from fd_core.router.policies import RouterPolicy\n"
        "class First(RouterPolicy):\n    def choose(self, view): return view.candidates[0]",
    )
    plugins = site.discover()
    assert plugins.load(ROUTER_POLICY, "first").__name__ == "First"
    with pytest.raises(PluginError, match="unknown router policy 'last'") as caught:
        plugins.load(ROUTER_POLICY, "last")
    assert caught.value.field == "--policy"


def test_postprocessor_named_as_a_backend_is_the_default_for_it(site):
    hook = "@hookimpl\ndef fd_register_postprocessors(): return [Entry('mychip', 'fd_mychip_parts:Mine', 'a kernel')]"
    site.install("fd-mychip", f"from fd_core.hookspecs import Entry, hookimpl\nFD_CONTRACT = 1\n{hook}")
    plugins = site.discover()
    assert plugins.default_postprocessor("mychip", "torch") == "mychip"
    assert plugins.default_postprocessor("otherchip", "torch") == "torch"
