import json

import pytest
import stores
from harness.bare_stores import bare_for
from stores import ALONE, BARE, SEALED, Contest

from fd_core.kv.stores.location import parse_location


def options(*arguments):
    return stores.parse([*arguments, "--size", "4", "--batch", "3", "--rounds", "2"])


@pytest.mark.parametrize("flag", ["size", "batch", "rounds"])
def test_wrong_flags_are_explained(flag, capsys):
    with pytest.raises(SystemExit):
        stores.parse(["memory:", f"--{flag}", "0"])
    assert f"--{flag} must be at least 1" in capsys.readouterr().err


def test_shares_are_taken_inside_rounds():
    contest = Contest(parse_location("disk:/x"), "plain files", 1000, 1)
    # A machine that is five times slower in one round: the share inside it is the same.
    contest.seconds = {("read", BARE): [1.0, 5.0, 1.0], ("read", SEALED): [2.0, 10.0, 2.0]}
    assert contest.share("read", SEALED) == 0.5
    assert contest.share("read", BARE) is None


def test_disk_is_compared_with_plain_files_which_are_removed(tmp_path):
    contest = stores.compete(parse_location(f"disk:{tmp_path / 'kv'}"), options(f"disk:{tmp_path / 'kv'}"))
    assert set(contest.seconds) == {(o, c) for o in ("read", "write") for c in (BARE, ALONE, SEALED)}
    assert all(len(rounds) == 2 for rounds in contest.seconds.values())
    assert [path.name for path in (tmp_path / "kv").rglob("*") if path.is_file()] == ["usage"]


def test_store_without_a_baseline_is_measured_alone():
    contest = stores.compete(parse_location("memory:"), options("memory:"))
    assert {contender for _, contender in contest.seconds} == {ALONE, SEALED}
    assert contest.share("read", SEALED) is None


def test_store_that_loses_values_is_not_measured(capsys, tmp_path):
    assert stores.main(["memory:?max_bytes=9000", "--size", "4", "--rounds", "1", "--out", str(tmp_path / "x")]) == 1
    assert "increase its capacity" in capsys.readouterr().out


def test_results_name_no_folder_of_this_machine(tmp_path):
    out = tmp_path / "stores"
    assert (
        stores.main([f"disk:{tmp_path / 'kv'}", "--size", "4", "--batch", "2", "--rounds", "1", "--out", str(out)]) == 0
    )
    text = out.with_suffix(".md").read_text()
    assert str(tmp_path) not in text + out.with_suffix(".json").read_text()
    assert "python benchmarks/stores.py disk:..." in text
    assert set(json.loads(out.with_suffix(".json").read_text())["stores"][0]["shares"]) >= {"read, bare", "write, bare"}


def test_schemes_of_one_redis_server_have_a_baseline():
    for text in ("redis://127.0.0.1:1/0", "valkey://127.0.0.1:1/0", "rediss://127.0.0.1:1/0", "redis+unix:///x"):
        pytest.importorskip("redis")
        assert bare_for(parse_location(text)).what == "redis-py"
    assert bare_for(parse_location("redis+cluster://127.0.0.1:1")) is None
