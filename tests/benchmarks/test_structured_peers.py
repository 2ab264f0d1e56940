"""The comparison of answers that follow a schema: what counts as valid, and which ratios its table shows."""

from __future__ import annotations

import json

import structured_peers

from fd_core.cli.bench.compare.stats import RequestResult

ANSWER = {
    "identifier": 1,
    "first_name": "a",
    "last_name": "b",
    "category": "customer",
    "address": {"street": "c", "postal_code": "01234", "country": "Japan"},
    "newsletter": True,
}
RESULT = RequestResult(tuple(range(11)), 1.0, 2.0)


def test_truncated_answers_are_not_counted_and_wrong_ones_are_invalid() -> None:
    whole = json.dumps(ANSWER)
    wrong = json.dumps(ANSWER | {"identifier": 0})
    found = structured_peers.measured([RESULT] * 3, [whole, wrong, whole[:-1]])
    assert (found.finished, found.valid) == (2, 1)
    assert (found.tpot_s, found.ttft_s, found.answer_s, found.tokens) == (0.1, 1.0, 2.0, 11)


def test_ratios_are_taken_inside_a_round_and_to_the_first_engine() -> None:
    def row(engine: str, round_number: int, free: float, schema: float) -> dict[str, object]:
        forms = {
            name: structured_peers.Measured(tpot, 0.01, 1.0, 70, 1, 1)
            for name, tpot in (("free", free), ("schema", schema))
        }
        return {"engine": engine, "round": round_number, "streams": 8} | forms

    rows = [row("ours", 1, 0.010, 0.005), row("theirs", 1, 0.010, 0.010)]
    rows += [row("ours", 2, 0.040, 0.020), row("theirs", 2, 0.040, 0.040)]
    rows += [row(engine, 1, 0.01, 0.01) | {"streams": 0} for engine in ("ours", "theirs")]
    table = structured_peers.summary(rows, ["ours", "theirs"], [8])
    assert "| 8 | ours | 25.00 | 12.50 | 0.50 | 1.00 |" in table
    assert "| 8 | theirs | 25.00 | 25.00 | 1.00 | 2.00 |" in table
