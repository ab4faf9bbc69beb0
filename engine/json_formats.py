"""Formats of strings in JSON schemas, as patterns where the grammar library is too kind: dates are days that exist.

It lets year 0, 29 February of any year and a 61st second through, which no client's date type reads.
"""

from __future__ import annotations

from typing import Any

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_DAY = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
PATTERNS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}T{_TIME}$"}
_DATA = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose values are no schemas."""


def with_exact_formats(schema: Any) -> Any:
    """The schema with a pattern in place of each format of PATTERNS. Nested at most as deep as GrammarSpec lets through."""
    if isinstance(schema, list):
        return [with_exact_formats(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    exact = {key: value if key in _DATA else with_exact_formats(value) for key, value in schema.items()}
    named = exact.get("format")
    if isinstance(named, str) and named in PATTERNS and "pattern" not in exact:
        del exact["format"]
        exact["pattern"] = PATTERNS[named]
    return exact
