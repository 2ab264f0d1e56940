"""Dashboards, alerts and autoscalers query existing metrics and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import get_args

import pytest
import yaml

from fd_core.router.selection import Reason
from fd_core.types import PrefillOutcome
from tests.deploy.manifests import CHART, DEPLOY, objects, of_kind
from tests.router.gateway.test_metrics import PROMISED as OF_ROUTERS
from tests.server.test_metric_names import PROMISED as OF_WORKERS

DASHBOARD = json.loads((DEPLOY / "grafana" / "fd_core.json").read_text())
ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
METRICS = OF_WORKERS | {f"fdcore_router_{name}": what for name, what in OF_ROUTERS.items()}
ADDED = {"namespace", "pod", "job", "instance", "le"}
"""Labels that Prometheus adds, and the one of buckets."""
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
EXPOSED = {name + suffix: what for name, what in METRICS.items() for suffix in SUFFIXES[what[0]]}


def asked() -> Iterator[tuple[str, str]]:
    """Yield every query with its location."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    for scaled in of_kind(objects("pairs"), "ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            yield f"trigger {trigger['name']} of {scaled['metadata']['name']}", trigger["metadata"]["query"]
    for scaled in of_kind(objects("hpa"), "HorizontalPodAutoscaler"):
        for metric in scaled["spec"]["metrics"]:
            yield f"metric of {scaled['metadata']['name']}", metric["pods"]["metric"]["name"]


ALL = list(asked())


def problems(query: str) -> list[str]:
    """Return the metrics and labels of a query that do not exist."""
    found = []
    bare = re.sub(r'"[^"]*"', '""', query)
    names = set(re.findall(r"\bfdcore\w*", bare)) | set(
        re.findall(r"\bfdcore\w*", "".join(re.findall(r'__name__=~"([^"]*)"', query)))
    )
    if not names:
        found.append("it queries no metric of fdcore")
    known: set[str] = set()
    for name in names:
        if name not in EXPOSED:
            found.append(f"unknown metric {name}")
        else:
            known |= set(EXPOSED[name][1])
    for name, matchers in re.findall(r"\b(fdcore\w*)\{([^}]*)\}", query):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', matchers)):
            if label not in ADDED | set(EXPOSED.get(name, ("", []))[1]):
                found.append(f"{name} has no label {label}")
    for labels in re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", query):
        for label in re.findall(r"\w+", labels):
            if label not in ADDED | known:
                found.append(f"nothing has the label {label} by which is grouped")
    for name in re.findall(r"\b(?:rate|increase)\((fdcore\w*)", query):
        if EXPOSED.get(name, ("counter",))[0] == "gauge":
            found.append(f"{name} is a gauge and has no rate")
    return found


@pytest.mark.parametrize(("where", "query"), ALL, ids=[f"{number}-{where}" for number, (where, _) in enumerate(ALL)])
def test_query_uses_existing_metrics_and_labels(where: str, query: str) -> None:
    assert problems(query) == []


@pytest.mark.parametrize(
    "query",
    [
        "up",
        "fdcore_requests",
        "rate(fdcore_preemptions[5m])",
        'fdcore_generations_total{reason="error"}',
        "sum by (outcome) (fdcore_requests_running)",
        "rate(fdcore_requests_running[5m])",
        "fdcore_router_worker_selected",
    ],
)
def test_query_with_unknown_metrics_or_labels_is_detected(query: str) -> None:
    assert problems(query)


def test_outcomes_in_alerts_exist() -> None:
    """A misspelt value matches nothing, and the alert would never fire."""
    values = {
        "fdcore_generations_total": {"stop", "length", "abort", "error", "disconnect"},
        "fdcore_prefills_elsewhere_total": set(get_args(PrefillOutcome)),
        "fdcore_router_refused_total": set(get_args(Reason)),
    }
    seen = 0
    for _, query in ALL:
        for name, _label, value in re.findall(r'\b(fdcore\w*)\{(outcome|reason)=~?"([^"]*)"', query):
            assert set(value.split("|")) <= values[name], query
            seen += 1
    assert seen >= 3


def test_text_of_alerts_uses_labels_of_their_series() -> None:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            grouped = re.match(r"(?:sum|min|max|count)\s+by\s+\(([^)]*)\)", rule["expr"])
            kept = set(re.findall(r"\w+", grouped[1])) if grouped else ADDED
            if rule["expr"].startswith("histogram_quantile"):
                kept = set(re.findall(r"\w+", re.findall(r"by \(([^)]*)\)", rule["expr"])[0])) - {"le"}
            for label in re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())):
                assert label in kept, rule["alert"]
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert rule["annotations"].keys() == {"summary", "description"}


def test_chart_installs_the_alerts_as_they_are() -> None:
    (rule,) = of_kind(objects("pairs"), "PrometheusRule")
    assert rule["spec"] == ALERTS


def test_panels_have_unique_ids_and_descriptions_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken and grid["x"] + grid["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".") and panel["targets"] and panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references)


@pytest.mark.parametrize(
    "name",
    [
        "fdcore_time_to_first_token_seconds",
        "fdcore_time_per_token_seconds",
        "fdcore_requests_waiting",
        "fdcore_kv_usage_ratio",
        "fdcore_prefix_hits_tokens_total",
        "fdcore_preemptions_total",
        "fdcore_drafts_accepted_tokens_total",
        "fdcore_router_worker_selected_total",
        "fdcore_kv_leases_open",
        "fdcore_generations_total",
    ],
)
def test_dashboard_shows_the_key_questions_of_operators(name: str) -> None:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert any(re.search(rf"\b{name}(_bucket)?\b", query) for query in queries)
