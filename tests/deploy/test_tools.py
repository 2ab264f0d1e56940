"""External tools accept the manifests; they run in `nox -s deploy`, which sets FD_HELM and installs the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import CHART, DEPLOY, FILES, objects
from tests.deploy.rendering import render
from tests.deploy.test_metrics import ALL, DASHBOARD

HELM = os.environ.get("FD_HELM", "")
pytestmark = pytest.mark.skipif(not HELM, reason="FD_HELM names no helm; `nox -s deploy` gives one")
CUSTOM = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}
"""Kinds of operators, for which Kubernetes has no schema."""


@pytest.mark.parametrize("name", FILES)
def test_manifests_equal_the_rendered_chart(name: str) -> None:
    assert render(HELM, name) == (DEPLOY / "kubernetes" / f"{name}.yaml").read_text(), "run nox -s deploy -- --write"


def test_helm_lint_passes() -> None:
    done = subprocess.run([HELM, "lint", "--strict", CHART], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", ["1.27.0", "1.37.0"])
@pytest.mark.parametrize("name", FILES)
def test_manifests_match_the_kubernetes_schema(name: str, version: str) -> None:
    validating = pytest.importorskip("kubernetes_validate")
    for each in objects(name):
        if each["kind"] not in CUSTOM:
            validating.validate(each, version, strict=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("modle=x", "modle"),
        ("router.replicas=0", "replicas"),
        ("worker.autoscaling.kind=often", "kind"),
        ("roles.prefill.replicas=1", "pairs need both"),
        ("roles.mixed.replicas=0", "no role has replicas"),
        ("auth.clients=perhaps", "clients"),
    ],
)
def test_invalid_values_are_rejected(wrong: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        render(HELM, "mixed", "--set", wrong)


def test_settings_become_flags() -> None:
    given = {"max-num-batched-tokens": 1_048_576, "native-kernels": False, "gpu-memory-utilization": 0.5}
    text = render(
        HELM,
        "mixed",
        "--set-json",
        f"worker.settings={json.dumps(given | {'served-model-name': ['a', 'b']})}",
    )
    flags = ("--max-num-batched-tokens=1048576", "--no-native-kernels", "--gpu-memory-utilization=0.5")
    assert all(flag in text for flag in (*flags, "--served-model-name=a", "--served-model-name=b"))


def test_container_file_passes_the_linter() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, DEPLOY / "Containerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_every_query_is_promql() -> None:
    parser = pytest.importorskip("promql_parser")
    for where, query in ALL:
        if not where.startswith("variable"):  # those are Grafana's own functions
            assert parser.parse(query.replace("$__rate_interval", "5m")), where


def test_alerts_pass_promtool() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian's package prometheus has it")
    alerts = CHART / "files" / "alerts.yaml"
    done = subprocess.run([promtool, "check", "rules", alerts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_dashboard_has_no_unknown_fields() -> None:
    """Its library reads the file and writes the same content: it would drop an unknown field."""
    dashboards = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    read = json.loads(JSONEncoder().encode(dashboards.Dashboard.from_json(DASHBOARD)))
    assert lost(DASHBOARD, read, Path()) == []


def lost(given: Any, kept: Any, at: Path) -> list[str]:
    if isinstance(given, dict):
        return [
            trouble
            for name, value in given.items()
            for trouble in (lost(value, kept[name], at / name) if name in kept else [str(at / name)])
        ]
    if isinstance(given, list):
        pairs = zip(given, kept, strict=True)
        return [trouble for number, both in enumerate(pairs) for trouble in lost(*both, at / str(number))]
    return [] if given == kept else [str(at)]
