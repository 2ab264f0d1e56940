"""The --slo option: limits on percentiles and on each request, and errors for other input."""

from __future__ import annotations

import pytest

from fd_core.errors import ConfigError
from fd_core.simulation.results.slo import parse_slo


def test_percentile_limits_also_define_goodput() -> None:
    slo = parse_slo("ttft_p99=0.5, tpot_p99=0.05,e2e_p95=10,gap_mean=1")
    assert [(each.measure, each.percentile, each.limit) for each in slo.objectives] == [
        ("ttft", 99.0, 0.5),
        ("tpot", 99.0, 0.05),
        ("e2e", 95.0, 10.0),
        ("gap", None, 1.0),
    ]
    assert slo.request_limits() == {"ttft": 0.5, "tpot": 0.05, "e2e": 10.0}
    assert slo.attainment is None


def test_per_request_limits_default_to_90_percent_attainment() -> None:
    assert parse_slo("ttft=0.5,tpot=0.05").attainment == 0.9
    assert parse_slo("ttft=0.5,attainment=0.99").attainment == 0.99


def test_per_request_limit_precedes_loosest_percentile() -> None:
    assert parse_slo("ttft_p50=0.2,ttft_p99.9=2").request_limits() == {"ttft": 2.0}
    assert parse_slo("ttft_p50=0.2,ttft=1,ttft_p99=2").request_limits() == {"ttft": 1.0}


@pytest.mark.parametrize("text", ["ttft_p99=0.5,tpot_p99=0.05", "ttft=0.5,attainment=0.9", "gap_p99.9=0.1,e2e_mean=3"])
def test_slo_text_round_trips(text: str) -> None:
    assert str(parse_slo(text)) == text
    assert parse_slo(str(parse_slo(text))) == parse_slo(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected NAME=NUMBER above 0, got ''"),
        ("ttft", "expected NAME=NUMBER above 0, got 'ttft'"),
        ("ttft:0.5", "expected NAME=NUMBER above 0, got 'ttft:0.5'"),
        ("ttft=soon", "got 'ttft=soon'"),
        ("ttft=0", "NUMBER above 0"),
        ("ttft=-1", "NUMBER above 0"),
        ("ttft=nan", "NUMBER above 0"),
        ("ttft=inf", "NUMBER above 0"),
        ("itl_p99=0.1", "unknown limit 'itl_p99'"),
        ("ttft_99=0.1", "unknown limit 'ttft_99'"),
        ("ttft_p100=0.1", "unknown limit 'ttft_p100'"),
        ("ttft_p0=0.1", "unknown limit 'ttft_p0'"),
        ("ttft_p9.9.9=0.1", "unknown limit 'ttft_p9.9.9'"),
        ("ttft_pinf=0.1", "unknown limit 'ttft_pinf'"),
        ("ttft_=0.1", "unknown limit 'ttft_'"),
        ("ttft_p99=1,ttft_p99=2", "ttft_p99 occurs twice"),
        ("attainment=0.9,attainment=0.8,ttft=1", "attainment occurs twice"),
        ("attainment=0.9", "there is no limit"),
        ("attainment=90,ttft=1", "expected an attainment of at most 1"),
        ("ttft_mean=1,attainment=0.9", "attainment needs a limit per request"),
        ("ttft_p99=1,", "NUMBER above 0, got ''"),
    ],
)
def test_invalid_slo_lists_valid_names(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_slo(text)
    assert words in caught.value.message
    assert "ttft, tpot, gap, e2e" in caught.value.message and "attainment" in caught.value.message
    assert (caught.value.field, caught.value.exit_code) == ("--slo", 2)
