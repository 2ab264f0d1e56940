"""Patterns and formats of JSON schemas for the grammar compiler, which interprets some of them otherwise."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Final

_PARTS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*\]|.", re.DOTALL)
"""Escapes, classes and other characters of a pattern."""
_ATOMS: Final = re.compile(
    r"\\(?:[pP]\{[^}]*\}|[pP].|x\{[^}]*\}|x[0-9a-fA-F]{2}|u\{[^}]*\}|u[0-9a-fA-F]{4}|.)|\[:\^?[a-z]+:\]|.", re.DOTALL
)
"""Members of a class, and the hyphens of ranges."""
_SETS: Final = re.compile(r"\\[dDsSwWpP]|\[:")
"""Members that are sets of characters, so that they begin and end no range."""
_ASCII_SETS: Final = {"\\d": "0-9", "\\w": "0-9A-Za-z_", "\\D": "[^0-9]", "\\W": "[^0-9A-Za-z_]"}
"""Members of a class for sets that have further characters for the compiler outside of JSON."""
_OPERATORS: Final = frozenset("[&~-")
"""Characters of a class that stand for themselves in ECMA 262, and for nested classes and operations on sets in the
compiler (`[a&&[^b]]`).
"""


def compilable_pattern(pattern: str) -> str:
    """Return a pattern whose classes the compiler interprets as ECMA 262 does, except for U+0000.

    A class with all control characters but without `"` or a backslash matches the escapes of both in the compiler's
    strings of JSON, so it is narrowed to one without U+0000.
    """
    return _PARTS.sub(lambda part: _compilable_part(part[0]), pattern)


def _compilable_part(text: str) -> str:
    if text in _ASCII_SETS:
        return f"[{_ASCII_SETS[text]}]"
    if text[0] != "[" or len(text) < 3:
        return text
    negated = "^" * text.startswith("[^")
    plain = list(_members(text[1 + len(negated) : -1]))
    members = "".join(_ASCII_SETS.get(each, each) for each in plain)
    if not _matches_wrong_escapes(f"[{negated}{''.join(plain)}]"):
        return f"[{negated}{members}]"
    return f"[^{members}\\x00]" if negated else f"[{members}--\\x00]"


def _members(inner: str) -> Iterator[str]:
    """Yield the members of a class and its ranges, with escaped operators."""
    atoms = _ATOMS.findall(inner)
    index = 0
    while index < len(atoms):
        first, rest = atoms[index], atoms[index + 1 : index + 3]
        if len(rest) == 2 and rest[0] == "-" and not any(_SETS.match(each) for each in (first, rest[1])):
            yield f"{_escaped(first)}-{_escaped(rest[1])}"
            index += 3
        else:
            yield _escaped(first)
            index += 1


def _escaped(atom: str) -> str:
    return f"\\{atom}" if atom in _OPERATORS else atom


def _matches_wrong_escapes(members: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            has = re.compile(members).match
    except re.error:  # such as Unicode properties
        return members.startswith("[^")
    return bool(has("\0") and has("\1")) and not (has('"') and has("\\"))


_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR: Final = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY: Final = "((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE: Final = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LOCAL: Final = "[A-Za-z0-9!#$%&'*+\\/=?^_{|}~-]+"
_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,46}[A-Za-z0-9])?"
_HEX: Final = "[0-9a-fA-F]"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_SEGMENT: Final = f"([A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_AUTHORITY: Final = rf"{_LABEL}(\.{_LABEL}){{0,4}}(:[0-9]{{1,4}})?"
FORMATS: Final[Mapping[str, tuple[str, ...]]] = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (f"{_DATE}T{_TIME}",),
    "email": (rf"{_LOCAL}(\.{_LOCAL})*@({_LABEL}\.){{1,4}}[A-Za-z]{{2,24}}", "[^@]{1,64}@[^@]+"),
    "uuid": (f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",),
    "ipv4": (rf"{_BYTE}(\.{_BYTE}){{3}}",),
    "uri": (
        rf"[a-z][a-z0-9+.-]{{1,20}}:(\/\/{_AUTHORITY}(\/{_SEGMENT}*)*|{_SEGMENT}+(\/{_SEGMENT}*)*)"
        rf"(\?({_SEGMENT}|[\/?])*)?(#({_SEGMENT}|[\/?])*)?",
    ),
}
"""Regular expressions of formats, all of which a text matches as a whole: those that most programs read.

Days exist, and seconds end at 59.
"""
INEXACT_FORMATS: Final = frozenset({"date", "time", "date-time", "email"})
"""Formats that the compiler interprets otherwise: 29 February in every year, second 60, names of any length."""


def format_patterns(name: str) -> list[str]:
    """Return the patterns of a schema's format."""
    return [f"^({each})$" for each in FORMATS[name]]
