"""The reference pages say what the code says."""

import pytest

import fd_core
from tests.reference import FOLDER, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == page(name), "python -m tests.reference writes it"


def test_the_page_of_python_has_every_public_name() -> None:
    shown = (FOLDER / "python.md").read_text(encoding="utf-8")
    assert [
        name for name in fd_core.__all__ if not name.startswith("__") and f"::: fd_core.{name}\n" not in shown
    ] == []
