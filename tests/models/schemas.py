"""Ten realistic schemas for a real model to fill."""

from __future__ import annotations

from typing import Any

__all__ = ["TEN"]


def obj(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


def whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


TEN: dict[str, dict[str, Any]] = {
    "person": obj({"name": text(24), "age": whole(0, 120), "member": {"type": "boolean"}}),
    "choice": obj({"mood": {"enum": ["glad", "sad", "calm"]}, "why": text(30)}),
    "list": obj({"colours": {"type": "array", "items": text(10), "minItems": 2, "maxItems": 4}}),
    "nested": obj({"city": obj({"name": text(20), "at": obj({"lat": whole(-90, 90), "lon": whole(-180, 180)})})}),
    "pattern": obj(
        {"date": {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-[0-2][0-8]$"}, "note": text(20)}
    ),
    "union": obj({"value": {"anyOf": [whole(0, 999), {"type": "null"}, {"const": "none"}]}}),
    "refs": {
        "$defs": {"tag": {"enum": ["red", "green", "blue"]}},
        **obj({"tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3}}),
    },
    "records": obj(
        {"rows": {"type": "array", "items": obj({"id": whole(1, 99), "ok": {"type": "boolean"}}), "maxItems": 3}}
    ),
    "number": obj({"price": {"type": "number", "minimum": 0, "maximum": 1000}, "unit": {"enum": ["EUR", "USD"]}}),
    "unicode": obj({"größe": {"enum": ["klein", "groß", "小さい"]}, "emoji": {"enum": ["😀", "🙁"]}}),
}
