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
        ("", "'' is not a name, = and a number above 0"),
        ("ttft", "'ttft' is not a name"),
        ("ttft:0.5", "'ttft:0.5' is not a name"),
        ("ttft=soon", "'ttft=soon' is not"),
        ("ttft=0", "a number above 0"),
        ("ttft=-1", "a number above 0"),
        ("ttft=nan", "a number above 0"),
        ("ttft=inf", "a number above 0"),
        ("itl_p99=0.1", "'itl_p99' is no limit that there is"),
        ("ttft_99=0.1", "'ttft_99' is no limit"),
        ("ttft_p100=0.1", "'ttft_p100' is no limit"),
        ("ttft_p0=0.1", "'ttft_p0' is no limit"),
        ("ttft_p9.9.9=0.1", "'ttft_p9.9.9' is no limit"),
        ("ttft_pinf=0.1", "'ttft_pinf' is no limit"),
        ("ttft_=0.1", "'ttft_' is no limit"),
        ("ttft_p99=1,ttft_p99=2", "ttft_p99 is there twice"),
        ("attainment=0.9,attainment=0.8,ttft=1", "attainment is there twice"),
        ("attainment=0.9", "there is no limit"),
        ("attainment=90,ttft=1", "attainment is a share, at most 1"),
        ("ttft_mean=1,attainment=0.9", "attainment needs a limit that a request can keep"),
        ("ttft_p99=1,", "'' is not a name"),
    ],
)
def test_invalid_slo_lists_valid_names(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_slo(text)
    assert words in caught.value.message
    assert "ttft, tpot, gap, e2e" in caught.value.message and "attainment" in caught.value.message
    assert (caught.value.field, caught.value.exit_code) == ("--slo", 2)
