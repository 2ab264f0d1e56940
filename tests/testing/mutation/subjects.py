"""Built-in plugins of each kind: their files, and the arguments by which pytest runs their kit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from fd_core.cli.plugins.scaffold import PluginKind
from fd_core.cli.plugins.scaffold.project import RECIPES
from fd_core.plugins import Plugins

_CORE: Final = Plugins.discover([])
_NAMED: Final = re.compile(r"{([a-z-]+)}")


@cache
def offered(kind: PluginKind) -> dict[str, str]:
    """Return the built-in plugins of a kind with their modules, none twice."""
    targets = {offer.entry.target: name for name, offer in reversed(_CORE.offered(RECIPES[kind].kind).items())}
    return {name: target.partition(":")[0] for target, name in reversed(targets.items())}


@dataclass(frozen=True)
class Subject:
    """Files of the plugins of one kind, and the runs of their kit, the quickest first."""

    runs: tuple[tuple[str, ...], ...]
    """An argument with `{KIND}` is given once for each name of that kind that the edited module offers, or for each of
    the kind if it offers none."""
    modules: tuple[str, ...]
    tests: tuple[str, ...] = ()
    """Tests of what the plugins decide freely; an edit that only these detect is none that the kit has to detect."""

    def runs_for(self, module: str) -> list[list[str]]:
        """Return the arguments of each run that concerns an edited module."""
        return [found for run in self.runs if (found := _for_module(run, module))]


def _for_module(run: Sequence[str], module: str) -> list[str]:
    """Return the arguments of a run, none if the module offers plugins of other kinds only."""
    alone = all(module not in offered(kind).values() for kind in PluginKind)
    found = []
    for word in run:
        if not (named := _NAMED.search(word)):
            found.append(word)
            continue
        names = [name for name, own in offered(PluginKind(named[1])).items() if alone or own == module]
        if not names:
            return []
        found += [word.replace(named[0], name) for name in names]
    return found


def of_core(package: str, *names: str) -> tuple[str, ...]:
    """Return the names of modules of a package of the core."""
    return tuple(f"fd_core.{package}.{name}" for name in names)


def offering(kind: PluginKind) -> tuple[str, ...]:
    """Return the modules that offer the plugins of a kind."""
    return tuple(dict.fromkeys(offered(kind).values()))


_SUITE: Final = "fd_core.testing.suite"
_CASES: Final = ("--pyargs", f"{_SUITE}.test_cases", "--fd-backend=mutant")
_BACKEND: Final = ("--pyargs", _SUITE, "--fd-backend=mutant")
_POSTPROCESSORS: Final = ("--pyargs", "fd_core.testing.postprocessors.suite", "--fd-postprocess={postprocess}")
_TOOLS: Final = ("--pyargs", "fd_core.testing.parsers.suite", "--fd-tool-parser={tool-parser}")
_REASONING: Final = ("--pyargs", "fd_core.testing.parsers.suite", "--fd-reasoning-parser={reasoning-parser}")
_PARSERS: Final = ((*_TOOLS, "--fd-quick"), _REASONING, (*_TOOLS, "-m", "fd_pairs or fd_scale"))
_SCHEDULER: Final = ("--pyargs", "fd_core.testing.schedulers.suite", "--fd-scheduler={scheduler}")
_OF_STORES: Final = "TestMemoryStore or TestDiskStore"
_OF_CONNECTORS: Final = "TestTCPConnector or TestSharedMemoryConnector or TestThroughDisk"
_FAMILIES: Final = ("--pyargs", "fd_core.testing.models.families.suite", "--fd-model-family={model}")
_DRAFTING: Final = tuple(f"tests/runner/test_{name}.py" for name in ("drafting", "draft_model", "drafter_contract"))


def _template(kind: PluginKind) -> tuple[tuple[str, ...], ...]:
    """Return the runs of the tests that `fdcore plugins new` writes, those of elapsed time last."""
    file = f"test_{{{kind}}}.py"
    return (file, "-m", "not timing and not fd_pairs"), (file, "-m", "timing or fd_pairs")


SUBJECTS: Final = {
    PluginKind.BACKEND: Subject(
        (
            (*_CASES, "--fd-quick"),
            (*_BACKEND, "--fd-quick", "--deselect", "fd_core/testing/suite/test_cases.py"),
            (*_CASES, "-m", "fd_pairs or fd_scale"),
        ),
        of_core("ops.numpy", "ops", "sampling", "kv_8bit"),
    ),
    PluginKind.MODEL: Subject((_FAMILIES,), offering(PluginKind.MODEL)),
    PluginKind.SCHEDULER: Subject(
        ((*_SCHEDULER, "--fd-quick"), (*_SCHEDULER, "-m", "fd_pairs")),
        of_core(
            "scheduling",
            "scheduler", "phases", "prefixes", "requests", "running.planner", "running.drafts",
            "running.output_processor", "running.plan", "running.running_batch", "running.slots", "running.tokens",
            "waiting.admission_control", "waiting.admission_planner", "waiting.queue", "operations.kv_offloading",
            "operations.kv_transferring", "operations.registry",
        ),
    ),
    PluginKind.SCHEDULING_POLICY: Subject(
        _template(PluginKind.SCHEDULING_POLICY),
        offering(PluginKind.SCHEDULING_POLICY),
        ("tests/scheduling/test_policies.py",),
    ),
    PluginKind.VICTIM_POLICY: Subject(
        _template(PluginKind.VICTIM_POLICY),
        offering(PluginKind.VICTIM_POLICY),
        ("tests/scheduling/test_policies.py",),
    ),
    PluginKind.DRAFTER: Subject(
        _template(PluginKind.DRAFTER), of_core("runner.drafting", "lookup", "draft_model"), _DRAFTING
    ),
    PluginKind.READING_DRAFTER: Subject(
        _template(PluginKind.READING_DRAFTER), of_core("runner.drafting", "eagle"), _DRAFTING
    ),
    PluginKind.POSTPROCESS: Subject(
        (_POSTPROCESSORS,), of_core("runner.postprocess", "numpy_matrix", "torch_matrix")
    ),
    PluginKind.STORE: Subject(
        (("tests/kv/stores/test_{store}.py", "-k", _OF_STORES),),
        (*offering(PluginKind.STORE), "fd_core.kv.stores.location"),
        ("tests/kv/stores", "-k", f"not ({_OF_STORES})"),
    ),
    PluginKind.CONNECTOR: Subject(
        (("tests/disagg/connectors/test_{connector}.py", "-k", _OF_CONNECTORS, "-m", "not soak"),),
        offering(PluginKind.CONNECTOR),
        ("tests/disagg/connectors", "-k", f"not ({_OF_CONNECTORS})"),
    ),
    PluginKind.ROUTER_POLICY: Subject(
        _template(PluginKind.ROUTER_POLICY), offering(PluginKind.ROUTER_POLICY), ("tests/router/test_policies.py",)
    ),
    PluginKind.LAUNCHER: Subject(
        _template(PluginKind.LAUNCHER), of_core("launching", "spawn", "owned", "child"), ("tests/launching",)
    ),
    PluginKind.SCALING_POLICY: Subject(
        (("tests/testing/test_scaling_policies.py", "-k", "TestLoadPolicy"),),
        offering(PluginKind.SCALING_POLICY),
        ("tests/cluster/test_scaling.py",),
    ),
    PluginKind.TOOL_PARSER: Subject(
        _PARSERS,
        (*offering(PluginKind.TOOL_PARSER), *of_core("text.parsing", "reader", "argument_types")),
        ("tests/text/parsing",),
    ),
    PluginKind.REASONING_PARSER: Subject(_PARSERS, offering(PluginKind.REASONING_PARSER), ("tests/text/parsing",)),
}  # fmt: skip
