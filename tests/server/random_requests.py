"""Random requests generated from an OpenAPI document, and the checks of each answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import checks
from schemathesis.generation import GenerationMode

__all__ = ["CHECKS", "operations", "send"]

CHECKS: Final = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)


def operations(document: Mapping[str, Any]) -> Sequence[Any]:
    """Return the operations of a document."""
    return [found.ok() for found in schemathesis.openapi.from_dict(dict(document)).get_all_operations()]


def send(
    url: str,
    operation: Any,
    mode: GenerationMode,
    *,
    examples: int,
    number: int | None = None,
    headers: Mapping[str, str] | None = None,
    seen: Callable[[int], object] = lambda status: None,
) -> None:
    """Send random requests; each answer must be documented and no server error.

    Without a seed (`number`), every run of a test sends the same requests. `seen` collects the status of each answer.
    """

    @settings(
        max_examples=examples,
        derandomize=number is None,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, headers=dict(headers or {}))
        seen(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    if number is not None:
        check = seed(number)(check)
    try:
        check()
    except BaseException as error:
        error.add_note(f"seed {number}, {operation.label}, {mode.value}")
        raise
