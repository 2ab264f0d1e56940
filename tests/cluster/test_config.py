"""Deployment files: errors name the field, and secrets are not shown."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.cli.serving.cluster import read_cluster_file
from fd_core.cluster import config as module
from fd_core.cluster.config import (
    ClusterConfig,
    ClusterSecrets,
    RouterGroup,
    WorkerGroup,
    cluster_config,
    router_spec,
    worker_spec,
)
from fd_core.cluster.deployment import plans_of
from fd_core.cluster.scaling import LoadPolicyOptions
from fd_core.errors import ConfigError

DOCUMENT = (Path(__file__).parents[2] / "docs" / "scale" / "cluster.md").read_text()
GOOD = """
model = "smollm2"
[router]
count = 2
[workers.prefill]
role = "prefill"
[workers.decode]
role = "decode"
min = 2
max = 4
settings = {max-num-seqs = 64, enable-prefix-caching = true, served-model-name = ["a", "b"]}
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "deployment.toml"
    file.write_text(text)
    return file


def test_file_defines_counts_of_routers_and_workers(tmp_path: Path) -> None:
    plans = plans_of(read_cluster_file(written(tmp_path, GOOD)))
    assert [(plan.name, plan.minimum, plan.maximum) for plan in plans] == [
        ("router", 2, 2),
        ("prefill", 1, 1),
        ("decode", 2, 4),
    ]


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("", "model", "required field"),
        ('model = "a"', "workers", "required field"),
        ('model = "a"\n[workers]', "workers", "no workers"),
        ('model = "a"\nmodle = "b"\n[workers.a]', "modle", "unknown setting"),
        ("model = 1\n[workers.a]", "model", "expected text"),
        ('model = "a"\n[workers.a]\ncuont = 1', "workers.a.cuont", "unknown setting"),
        ('model = "a"\n[workers.a]\ncount = 0', "workers.a.count", "out of range"),
        ('model = "a"\n[workers.a]\ncount = 1\nmax = 2', "workers.a.max", "exclude each other"),
        ('model = "a"\n[workers.a]\nmin = 3\nmax = 2', "workers.a.min", "exceeds max"),
        ('model = "a"\n[workers.a]\nmin = 3', "workers.a.max", "requires max"),
        ('model = "a"\n[workers.a]\nscaling = {waiting = 1}', "workers.a.scaling", "variable number"),
        ('model = "a"\n[workers.a]\nrole = "both"', "workers.a.role", "expected one of"),
        ('model = "a"\n[workers.a]\nrole = "prefill"', "workers", "need decode"),
        ('model = "a"\n[workers.A]', "workers.A", "name"),
        ('model = "a"\n[workers]\na = 3', "workers.a", "expected a table"),
        ('model = "a"\n[router]\ncount = 9\nport = 65530\n[workers.a]', "router.port", "exceed port 65535"),
        ('model = "a"\n[workers.a.settings]\nport = 1', "workers.a.settings", "chooses"),
        ('model = "a"\n[workers.a.settings]\napi_key = "k"', "workers.a.settings", "command line"),
        ('model = "a"\n[workers.a.settings]\nkv-store = "redis://u:p@h/0"', "workers.a.settings", "password"),
        ('model = "a"\n[router.settings]\nssl-certfile = "c"\n[workers.a]', "router.settings", "TLS"),
        ('model = "a"\n[workers.a.settings]\nmax-num-seq = 1', "workers.a.settings", "did you mean 'max-num-seqs'"),
        ('model = "a"\n[workers.a.settings]\nmax-num-seqs = "x"', "workers.a.settings", "--max-num-seqs"),
        ('model = "a"\n[router.settings]\nmax-attempts = 0\n[workers.a]', "router.settings", "--max-attempts"),
        ('model = "a"\n[workers.a.secrets]\nkv-stroe = "V"', "workers.a.secrets", "unknown setting"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, text: str, field: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_cluster_file(written(tmp_path, text))
    assert caught.value.field == field and expected in str(caught.value)


def test_bad_file_exits_with_code_2_and_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cluster", "serve", str(written(tmp_path, 'model = "a"'))])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "workers" in result.stderr


def test_secret_in_file_is_not_repeated_in_error() -> None:
    with pytest.raises(ConfigError, match="name of a variable") as caught:
        cluster_config({"model": "a", "workers": {"a": {"secrets": {"api-key": "sk-not-a-variable"}}}})
    assert "sk-" not in str(caught.value)


def test_secrets_are_not_passed_as_arguments() -> None:
    table: dict[str, Any] = {
        "model": "a",
        "router": {"secrets": {"api-key-file": "KEYS"}},
        "workers": {"a": {"secrets": {"kv-store": "REDIS"}}},
    }
    config, variables = cluster_config(table), {"KEYS": "the keys", "REDIS": "redis://u:p@h/0"}
    router = router_spec("router-1", config, 8000, ClusterSecrets(), variables)
    worker = worker_spec("a-1", config, "a", ClusterSecrets(), variables)
    assert router.secrets["FD_CONTENT_OF_API_KEY_FILE"] == "the keys"
    assert worker.secrets["FD_KV_STORE"] == "redis://u:p@h/0"
    for spec in (router, worker):
        assert not set(spec.secrets.values()) & {*spec.command, *spec.environment.values()}
        assert not any(secret in repr(spec) for secret in spec.secrets.values())
    with pytest.raises(ConfigError, match="KEYS is not set"):
        router_spec("router-1", config, 8000, ClusterSecrets(), {})


def test_settings_become_flags(tmp_path: Path) -> None:
    config = read_cluster_file(written(tmp_path, GOOD))
    command = worker_spec("decode-1", config, "decode", ClusterSecrets(), {}).command
    for word in ("--max-num-seqs=64", "--enable-prefix-caching", "--served-model-name=a", "--served-model-name=b"):
        assert word in command
    assert command[command.index("--role") + 1] == "decode"


def meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the code's description of each field, on one line."""
    tree = ast.parse(Path(module.__file__).read_text()) if struct.__module__ == module.__name__ else None
    tree = tree or ast.parse((Path(module.__file__).parent / "scaling.py").read_text())
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = {}
    for each in reversed(struct.__mro__):
        body = classes[each.__name__].body if each.__name__ in classes else []
        for node, after in itertools.zip_longest(body, body[1:]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                found[node.target.id] = " ".join(str(text).split()) or found.get(node.target.id, "")
    return found


def default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    value = field.default if field.default is not msgspec.NODEFAULT else {}
    return "" if value in (None, {}) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


@pytest.mark.parametrize("struct", [ClusterConfig, RouterGroup, WorkerGroup, LoadPolicyOptions])
def test_document_matches_field_descriptions(struct: type[msgspec.Struct]) -> None:
    expected = meanings(struct)
    rows = [
        f"| `{field.encode_name}` | {default(field)} | {expected[field.name]} |\n"
        for field in msgspec.structs.fields(struct)
    ]
    assert "".join(rows) in DOCUMENT


def test_example_files_in_document_are_valid(tmp_path: Path) -> None:
    texts = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(texts) >= 2
    for text in texts:
        assert read_cluster_file(written(tmp_path, text)).workers
