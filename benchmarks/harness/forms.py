"""Schema of the measured answers, and its length in tokens."""

from __future__ import annotations

from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 1, "maximum": 99999},
        "first_name": {"type": "string", "maxLength": 16},
        "last_name": {"type": "string", "maxLength": 16},
        "category": {"enum": ["customer", "supplier", "employee"]},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 24},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["Germany", "France", "Japan", "Brazil"]},
            },
            "required": ["street", "postal_code", "country"],
            "additionalProperties": False,
        },
        "newsletter": {"type": "boolean"},
    },
    "required": ["identifier", "first_name", "last_name", "category", "address", "newsletter"],
    "additionalProperties": False,
}
FREE_TOKENS = 72
"""Approximate length of an answer with the schema."""
