"""Parsed manifests of deploy/kubernetes, as the chart renders them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "fd-core"
FILES = {"mixed": None, "pairs": CHART / "examples" / "pairs.yaml", "hpa": CHART / "examples" / "hpa.yaml"}
"""Names of the rendered manifests, and the values that each is rendered with."""
NAMESPACE = "llm"

Object = Mapping[str, Any]


@cache
def objects(name: str) -> list[Object]:
    """Return the objects of one file."""
    text = (DEPLOY / "kubernetes" / f"{name}.yaml").read_text()
    return [each for each in yaml.safe_load_all(text) if each is not None]


def of_kind(found: Iterable[Object], *kinds: str) -> Iterator[Object]:
    return (each for each in found if each["kind"] in kinds)


def pods(found: Iterable[Object]) -> dict[str, Object]:
    """Return the pod templates, by the name of their controller."""
    return {each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(found, "Deployment", "StatefulSet")}


def programs(found: Iterable[Object]) -> dict[str, tuple[Object, Object]]:
    """Return the pods that run fdcore, and their container."""
    made = {name: (pod, pod["spec"]["containers"][0]) for name, pod in pods(found).items()}
    return {name: both for name, both in made.items() if both[1]["args"][0] in ("serve", "route")}


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Return True if a label selector matches an object with these labels."""
    known = {"matchLabels", "matchExpressions"}
    assert selector.keys() <= known, selector
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    listed = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in listed)
    return exact and all(labels.get(each["key"]) in each["values"] for each in listed)


def flag(container: Object, name: str) -> str | None:
    """Return the value of a flag."""
    found = [arg.partition("=")[2] for arg in container["args"] if arg.partition("=")[0] == name]
    assert len(found) <= 1, found
    return found[0] if found else None
