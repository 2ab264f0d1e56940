"""Synthetic workloads: reproducible per seed, ordered, with the configured rate and lengths."""

import hashlib
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.simulation.workloads.conversations import tokens_of
from fd_core.simulation.workloads.workload import read_workload

ARRIVALS = ("poisson", "gamma", "bursts", "diurnal", "constant")
FULL = (
    "rate=4,prompt=lognormal:512:0.8,output=zipf:1.2:1:500,requests=300,turns=uniform:1:4,think=exponential:20,"
    "prefixes=4x256,max_tokens=900,tenants=gold:3/bulk:1,priorities=0:1/5:1,leave=0.3,patience=uniform:1:9"
)


def read(text, seed=1):
    return read_workload(text, seed)


def encoded(workload):
    rows = (msgspec.structs.replace(one, turns=tuple(one.turns)) for one in workload)
    return b"".join(map(msgspec.msgpack.encode, rows))


def starts(text, seed=1):
    return np.array([one.at for one in read(text, seed)])


@pytest.mark.parametrize("kind", ARRIVALS)
def test_workload_bytes_depend_on_the_seed_only(kind):
    text = f"{kind}:{FULL}"
    once = encoded(read(text))
    assert once == encoded(read(text))
    assert once != encoded(read(text, seed=2))
    workload = read(text)
    assert encoded(workload) == encoded(workload) == once


def test_images_precede_the_text_of_each_request_and_change_nothing_else():
    with_images, without = (
        list(read(f"poisson:turns=2,prefixes=2x9,requests=8{each}")) for each in (",images=2x30", "")
    )
    pieces = [piece for one in with_images for turn in one.turns for piece in turn.adds if piece.image]
    assert len({piece.seed for piece in pieces}) == 16 and {piece.tokens for piece in pieces} == {30}
    for one, other in zip(with_images, without, strict=True):
        for turn, plain in zip(one.turns, other.turns, strict=True):
            assert [piece.image for piece in turn.adds[-3:]] == [True, True, False]
            assert msgspec.structs.replace(turn, adds=(*turn.adds[:-3], turn.adds[-1])) == plain


def test_workload_bytes_are_platform_independent():
    digest = hashlib.sha256(encoded(read(f"gamma:cv=2,{FULL}"))).hexdigest()
    assert digest[:16] == "c1c844de1012a5ed"


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(ARRIVALS),
    st.floats(0.01, 1000),
    st.integers(1, 400),
    st.integers(1, 5),
    st.integers(0, 2**63 - 1),
)
def test_conversations_are_ordered_with_requested_count(kind, rate, requests, turns, seed):
    found = list(read(f"{kind}:rate={rate},requests={requests},turns={turns}", seed))
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert sum(len(one.turns) for one in found) == requests
    assert len({one.name for one in found}) == len(found)
    seeds = [piece.seed for one in found for turn in one.turns for piece in (*turn.adds, turn.answer)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("text", "cv"), [("poisson:", 1), ("gamma:cv=3,", 3), ("gamma:cv=0.3,", 0.3), ("constant:", 0)]
)
def test_gaps_have_configured_mean_and_spread(text, cv):
    gaps = np.diff(starts(f"{text}rate=8,requests=20000"))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-4)


def test_bursts_have_configured_rate():
    times = starts("bursts:rate=5,on=10,off=30,quiet=0.1,requests=20000")
    assert times[-1] == pytest.approx(4000, rel=0.05)
    assert np.mean(times % 40 < 10) == pytest.approx(0.9, abs=0.01)


def test_daily_load_peaks_at_midday():
    times = starts("diurnal:rate=10,period=100,depth=0.8,duration=2000")
    assert len(times) == pytest.approx(20000, rel=0.05)
    hours = np.histogram(times % 100, bins=10, range=(0, 100))[0] / 2000
    expected = [1 - 0.8 * np.sinc(0.1) * np.cos(2 * np.pi * (at + 0.5) / 10) for at in range(10)]
    assert hours == pytest.approx(np.array(expected), abs=0.1)


@pytest.mark.parametrize(
    ("form", "mean", "low", "high"),
    [
        ("300", 300, 300, 300),
        ("uniform:100:200", 150, 100, 200),
        ("exponential:200", 200, 1, 1000),
        ("lognormal:400:0.3", 418, 1, 1000),
        ("zipf:1:10:20", 12.6, 10, 20),
    ],
)
def test_lengths_follow_distribution_and_limit(form, mean, low, high):
    workload = read(f"poisson:requests=20000,output={form},longest=1000")
    lengths = np.array([one.turns[0].answer.tokens for one in workload])
    assert lengths.min() >= low
    assert lengths.max() <= high
    assert lengths.mean() == pytest.approx(mean, rel=0.05)


def test_file_lengths_are_drawn_jointly_or_independently(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("# prompt, output\n100,10\n200 20\n")
    pairs = {(one.turns[0].adds[0].tokens, one.turns[0].answer.tokens) for one in read(f"poisson:lengths={path}")}
    assert pairs == {(100, 10), (200, 20)}
    path.write_text("7\n9\n")
    apart = read(f"poisson:prompt=file:{path},output=file:{path}")
    found = {(one.turns[0].adds[0].tokens, one.turns[0].answer.tokens) for one in apart}
    assert found == {*itertools.product((7, 9), repeat=2)}


def test_shared_prefixes_follow_popularity():
    found = list(read("poisson:requests=8000,prefixes=4x256,prompt=8,turns=2", seed=2))
    firsts = [one.turns[0].adds[0] for one in found]
    assert all(len(one.turns[0].adds) == 2 and len(one.turns[1].adds) == 1 for one in found)
    counts = sorted((firsts.count(piece) for piece in set(firsts)), reverse=True)
    assert [count / len(firsts) for count in counts] == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.02)
    assert {piece.tokens for piece in firsts} == {256}
    assert len({tokens_of(piece, 32000).tobytes() for piece in set(firsts)}) == 4


def test_client_mix_is_as_configured():
    text = "poisson:requests=8000,tenants=gold:3/bulk:1,priorities=0:9/5:1,leave=0.25,patience=7,max_tokens=64"
    found = list(read(text))
    turns = [turn for one in found for turn in one.turns]
    assert np.mean([one.tenant == "gold" for one in found]) == pytest.approx(0.75, abs=0.02)
    assert np.mean([one.priority == 5 for one in found]) == pytest.approx(0.1, abs=0.02)
    assert np.mean([turn.patience == 7 for turn in turns]) == pytest.approx(0.25, abs=0.02)
    assert {turn.patience for turn in turns} == {7, None}
    assert {(turn.max_tokens, turn.answer.tokens) for turn in turns} == {(64, 128)}


def test_keys_draw_from_independent_streams():
    plain = read(f"poisson:{FULL}")
    others = read(f"poisson:{FULL.replace('lognormal:512:0.8', 'uniform:1:9')},adds=5")
    same = [(one.at, one.tenant, [turn.answer for turn in one.turns]) for one in plain]
    assert same == [(one.at, one.tenant, [turn.answer for turn in one.turns]) for one in others]


@pytest.mark.parametrize("kind", ARRIVALS)
def test_scaled_workload_has_same_conversations_in_less_time(kind):
    workload = read(f"{kind}:{FULL}")
    before, after = list(workload), list(workload.scaled(2))
    assert [one.turns for one in before] == [one.turns for one in after]
    assert "rate=8" in workload.scaled(2).description
    if kind in ("poisson", "gamma", "constant"):
        assert [one.at / 2 for one in before] == pytest.approx([one.at for one in after], abs=1e-6)


def test_closed_loop_users_start_at_once_and_pause_between():
    workload = read("closed:users=3,requests=10,turns=2,think=exponential:5,prefixes=2x64")
    found = list(workload)
    assert [(one.at, len(one.turns)) for one in found] == [(0, 3), (0, 3), (0, 4)]
    for one in found:
        assert [turn.fresh for turn in one.turns] == [False, False, True, False][: len(one.turns)]
        assert [turn.think > 0 for turn in one.turns] == [False, True, True, True][: len(one.turns)]
        assert [len(turn.adds) for turn in one.turns] == [2, 1, 2, 1][: len(one.turns)]
        assert [one.turns[at] for at in (2, 0, 1, -1)] == [tuple(one.turns)[at] for at in (2, 0, 1, -1)]
    assert len(list(workload.scaled(2))) == 6
    assert encoded(workload) == encoded(workload)


def test_user_requests_do_not_depend_on_number_of_users():
    few, many = (list(read(f"closed:users={users},requests={10 * users},output=exponential:90")) for users in (2, 5))
    assert [tuple(one.turns) for one in few] == [tuple(one.turns) for one in many[:2]]
    assert tuple(few[0].turns) != tuple(few[1].turns)


def test_slow_arrivals_produce_all_requests():
    assert len(list(read("constant:rate=1e-6,requests=300"))) == 300


def test_conversations_are_generated_lazily():
    workload = read("poisson:requests=100000000,turns=2")
    assert [one.name for one in itertools.islice(workload, 3)] == ["0", "1", "2"]
    first = next(iter(read("closed:users=2,requests=100000000")))
    assert len(first.turns) == 50_000_000
    assert first.turns[20].fresh


@pytest.mark.parametrize(("text", "cv"), [("poisson:", 1), ("gamma:cv=2,", 2), ("gamma:cv=0.5,", 0.5)])
def test_gaps_are_independent_and_follow_distribution(text, cv):
    gaps = np.diff(starts(f"{text}rate=8,requests=40000")) * 8
    around = (gaps - gaps.mean()) / gaps.std()
    assert np.mean(around**3) == pytest.approx(2 * cv, rel=0.15)
    assert np.mean(around[1:] * around[:-1]) == pytest.approx(0, abs=0.03)
    if cv == 1:
        assert np.quantile(gaps, (0.1, 0.5, 0.9)) == pytest.approx(-np.log((0.9, 0.5, 0.1)), rel=0.05)


@pytest.mark.parametrize(("kind", "spread"), [("poisson:", 1), ("gamma:cv=3,", 9), ("constant:", 0)])
def test_arrival_counts_have_expected_variance(kind, spread):
    times = starts(f"{kind}rate=10,duration=4000")
    counts = np.histogram(times, bins=200, range=(0, 4000))[0]
    assert counts.var() / counts.mean() == pytest.approx(spread, rel=0.35, abs=0.01)


def test_arrivals_are_uniform_within_and_between_bursts():
    times = starts("bursts:rate=5,on=10,off=30,quiet=0.5,requests=20000") % 40
    on, off = times[times < 10], times[times >= 10]
    assert (on.mean(), on.std()) == pytest.approx((5, 10 / 12**0.5), rel=0.03)
    assert (off.mean(), off.std()) == pytest.approx((25, 30 / 12**0.5), rel=0.03)


@pytest.mark.parametrize(
    ("form", "mean", "spread"),
    [
        ("uniform:100:400", 250, 300 / 12**0.5),
        ("exponential:400", 400, 400),
        ("lognormal:400:0.5", 400 * np.exp(0.125), 400 * np.exp(0.125) * (np.exp(0.25) - 1) ** 0.5),
    ],
)
def test_lengths_and_pauses_have_configured_spread(form, mean, spread):
    made = read(f"poisson:requests=40000,turns=2,prompt={form},output={form},think={form},leave=1,patience={form}")
    turns = [one.turns for one in made]
    rows = np.array([(a.adds[0].tokens, a.answer.tokens, b.think, a.patience) for a, b in turns])
    assert rows.mean(0) == pytest.approx(np.full(4, mean), rel=0.03)
    assert rows.std(0) == pytest.approx(np.full(4, spread), rel=0.05)
    assert np.corrcoef(rows.T) == pytest.approx(np.eye(4), abs=0.03)


def test_popular_lengths_follow_their_rank():
    lengths = [one.turns[0].answer.tokens for one in read("poisson:requests=30000,output=zipf:1.5:5:8")]
    weights = np.arange(1.0, 5) ** -1.5
    assert np.bincount(lengths)[5:] / len(lengths) == pytest.approx(weights / weights.sum(), abs=0.01)


def test_tenants_priorities_and_disconnects_are_independent():
    found = list(read("poisson:requests=20000,tenants=a:1/b:3,priorities=0:1/5:1,leave=0.5"))
    rows = np.array([(one.tenant == "a", one.priority, one.turns[0].patience is None) for one in found])
    assert np.corrcoef(rows.T) == pytest.approx(np.eye(3), abs=0.03)
