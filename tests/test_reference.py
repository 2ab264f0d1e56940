"""The reference pages are generated and list every public name."""

from pathlib import Path

import pytest

import fd_core
from fd_core.cli.settings.flags import ENGINE_FLAGS, ROUTER_FLAGS, SERVER_FLAGS
from tests.reference import GENERATED, MODELS, PAGES, page, with_architectures

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", GENERATED)
def test_a_page_is_generated_with_a_title_and_is_not_in_the_repository(name: str) -> None:
    text = GENERATED[name]()
    assert text.startswith("# ") and text.endswith("\n") and text.count("\n## ") >= 2
    assert not (DOCS / name).exists()


def test_table_of_architectures_is_that_of_the_installed_families() -> None:
    text = MODELS.read_text()
    assert "LlamaForCausalLM" in text
    assert text == with_architectures(text), "run python -m tests.reference"


def test_every_page_is_linked_from_the_index() -> None:
    index = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    assert [name for name in PAGES if f"]({name})" not in index] == []


def test_every_flag_has_a_row() -> None:
    rows = page("settings.md")
    assert [flag.flag for flag in (*ENGINE_FLAGS, *SERVER_FLAGS, *ROUTER_FLAGS) if f"| `{flag.flag}" not in rows] == []


def test_the_page_of_python_has_every_public_name() -> None:
    shown = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    assert [
        name for name in fd_core.__all__ if not name.startswith("__") and f"::: fd_core.{name}\n" not in shown
    ] == []
