"""Every block of the documents is run or parsed by a test, or its mark has the reason; the marks are counted."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fd_core.cli.serving.cluster import read_cluster_file
from fd_core.cluster.deployment import plans_of
from fd_core.http.access.keys import read_key_file
from fd_core.simulation.workloads.workload import read_workload
from tests.documents.blocks import DOCUMENTS, REASONS, ROOT, Block, blocks_of
from tests.documents.reader import commands
from tests.documents.test_pages import DONE

MOST: Mapping[str, int] = {
    "needs a GPU": 3,
    "needs the network": 10,
    "takes too long": 4,
    "needs another machine": 8,
}
"""Number of blocks that are not run here, by reason: fewer is better, and more needs a change of this table."""
READ = ("toml", "yaml", "json")
BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
MARKED = [block for block in BLOCKS if block.why is not None]
FILES = [block for block in BLOCKS if block.language in READ and block.why is None]


def test_every_fence_belongs_to_a_block_that_was_found() -> None:
    for document in DOCUMENTS:
        fences = [line for line in document.read_text().splitlines() if line.lstrip().startswith("```")]
        assert len(fences) == 2 * len(blocks_of(document)), document


def test_every_mark_belongs_to_a_block() -> None:
    for document in DOCUMENTS:
        marks = document.read_text().count("<!-- not run: ")
        assert marks == sum(f"not run: {block.why} -->" in document.read_text() for block in blocks_of(document)), (
            f"{document}: a mark stands on the line before its block"
        )


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_run_or_parsed_or_has_a_reason(block: Block) -> None:
    if block.why is None:
        assert block.language in (*DONE, *READ, "text"), (
            f"{block}: no test runs {block.language or 'a block without a language'}; give it a language that one does,"
            f" or `<!-- not run: REASON -->` before it, with one of {', '.join(REASONS)}"
        )
    else:
        assert block.why.startswith(REASONS), f"{block}: {block.why!r} is not one of {', '.join(REASONS)}"


@pytest.mark.parametrize("block", [each for each in MARKED if "is run by" in str(each.why)], ids=str)
def test_named_test_of_a_block_exists_and_names_its_page(block: Block) -> None:
    test = ROOT / str(block.why).removeprefix("is run by ")
    assert test.is_file()
    assert test.name == "noxfile.py" or Path(block.document).name in test.read_text(), f"{test} never reads {block}"


def test_number_of_skipped_blocks_is_recorded() -> None:
    found = Counter(str(block.why) for block in MARKED if "is run by" not in str(block.why))
    elsewhere = sum("is run by" in str(block.why) for block in MARKED)
    shown = Counter(block.language for block in BLOCKS if block.why is None)
    print(f"{len(BLOCKS)} blocks: {sum(shown.values()) - shown['text']} run or read here, {elsewhere} by other tests,")
    print(f"{shown['text']} show what is printed or meant, {found.total()} are not run:")
    for reason, count in found.most_common():
        print(f"  {count:3} {reason}")
    assert found == MOST, "count the marks again: the table must have their number"


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language in ("sh", "bash", "console")], ids=str)
def test_shell_understands_every_block(block: Block) -> None:
    assert commands(block.text)


@pytest.mark.parametrize("block", FILES, ids=str)
def test_files_in_blocks_are_valid(block: Block, tmp_path: Path) -> None:
    file = tmp_path / (block.file or f"file.{block.language}")
    file.write_text(block.text)
    file.chmod(0o600)
    if block.language == "toml":
        _taken(tomllib.loads(block.text), file)
    elif block.language == "yaml":
        [job] = yaml.safe_load(block.text)["scrape_configs"]
        assert job["job_name"] and job["static_configs"][0]["targets"]
    else:
        assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


def _taken(table: dict[str, Any], file: Path) -> None:
    """Parse a TOML file with the parser of its kind."""
    if "keys" in table:
        assert {key.name for key in read_key_file(file)} == {each["name"] for each in table["keys"]}
    elif "workers" in table:
        assert plans_of(read_cluster_file(file))
    else:
        (file.parent / table["file"]).write_text(
            '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
        )
        assert read_workload(str(file), 0)
