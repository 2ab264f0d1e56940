"""What is different between the projects of one kind of plugin and of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from fd_core.cli.plugins.scaffold import Framework, PluginKind
from fd_core.plugins import (
    BACKEND,
    CONNECTOR,
    POSTPROCESS,
    REASONING_PARSER,
    ROUTER_POLICY,
    SCHEDULER,
    STORE,
    TOOL_PARSER,
    Kind,
)

TITLES: Final[Mapping[Framework, str]] = {
    Framework.TORCH: "torch",
    Framework.PADDLE: "Paddle",
    Framework.ONNX: "ONNX Runtime",
    Framework.NUMPY: "numpy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldRecipe:
    """One kind of project. Texts may hold the words of templates, such as `$name`."""

    kind: Kind[Any]
    what: str
    """What people call it."""
    module: str
    suffix: str
    """Behind the name, the name of its class."""
    files: Mapping[str, tuple[str, str]]
    """Files of the package to their templates, and what each is for."""
    summary: str
    """The line that lists show."""
    about: str = ""
    """How the README's first sentence goes on."""
    prove: str = "pytest   # does it keep its contract?"
    use: str = "fdcore serve smollm2 $flag $name"
    guide: str


RECIPES: Final[Mapping[PluginKind, ScaffoldRecipe]] = MappingProxyType(
    {
        PluginKind.BACKEND: ScaffoldRecipe(
            kind=BACKEND,
            what="hardware backend",
            module="backend",
            suffix="Backend",
            files={
                "backend.py": (
                    "backends/backend_$framework.py",
                    "the device: whether it is here, its memory, its limits",
                ),
                "ops.py": ("backends/ops_$framework.py", "the operations: those of $title, and the device's own"),
            },
            summary="$name, driven by $title",
            about=": models on $name, computed by $title.\nAs written it runs on the processor and says *emulated*",
            prove="fdcore conformance $name   # does the backend behave as every other? --quick takes a minute",
            guide="write-a-backend.md",
        ),
        PluginKind.SCHEDULER: ScaffoldRecipe(
            kind=SCHEDULER,
            what="scheduler",
            module="scheduler",
            suffix="Scheduler",
            files={"scheduler.py": ("scheduler.py", "the scheduler: what each step computes")},
            summary="requests enter and leave together",
            prove="fdcore conformance --scheduler $name   # does it keep the law? --quick takes a minute",
            guide="write-a-scheduler.md",
        ),
        PluginKind.POSTPROCESS: ScaffoldRecipe(
            kind=POSTPROCESS,
            what="postprocessor",
            module="postprocess",
            suffix="Postprocess",
            files={"postprocess.py": ("postprocess.py", "the postprocessor: the token matrix of a step")},
            summary="looks up what a row delivers",
            prove="fdcore conformance --postprocess $name   # does it keep the law?",
            guide="write-a-postprocessor.md",
        ),
        PluginKind.STORE: ScaffoldRecipe(
            kind=STORE,
            what="KV store",
            module="store",
            suffix="Store",
            files={"store.py": ("store.py", "the store: named values outside the engine")},
            summary="an SQLite file",
            use="fdcore serve smollm2 --kv-store $name:kv.db",
            guide="write-a-store.md",
        ),
        PluginKind.CONNECTOR: ScaffoldRecipe(
            kind=CONNECTOR,
            what="connector",
            module="connector",
            suffix="Connector",
            files={"connector.py": ("connector.py", "the connector: how KV travels between two workers")},
            summary="files in a folder that both workers see",
            use="fdcore serve smollm2 --role decode --kv-connector $name",
            guide="write-a-connector.md",
        ),
        PluginKind.ROUTER_POLICY: ScaffoldRecipe(
            kind=ROUTER_POLICY,
            what="router policy",
            module="policy",
            suffix="Policy",
            files={"policy.py": ("router_policy.py", "the policy: which worker gets a request")},
            summary="the most of the prompt held, among workers with few requests",
            use="fdcore route --policy $name --worker http://127.0.0.1:8001",
            guide="write-a-router-policy.md",
        ),
        PluginKind.TOOL_PARSER: ScaffoldRecipe(
            kind=TOOL_PARSER,
            what="tool parser",
            module="parser",
            suffix="Tools",
            files={"parser.py": ("tool_parser.py", "the parser: which parts of an answer are calls")},
            summary="calls on lines that begin with CALL",
            prove="fdcore conformance --tool-parser $name   # does it keep the law?",
            guide="write-a-parser.md",
        ),
        PluginKind.REASONING_PARSER: ScaffoldRecipe(
            kind=REASONING_PARSER,
            what="reasoning parser",
            module="parser",
            suffix="Reasoning",
            files={"parser.py": ("reasoning_parser.py", "the parser: which part of an answer is reasoning")},
            summary="from THINK: to ANSWER:",
            prove="fdcore conformance --reasoning-parser $name   # does it keep the law?",
            guide="write-a-parser.md",
        ),
    }
)
