"""The reference pages say what the code says."""

import pytest

from tests.reference import FOLDER, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == page(name), "python -m tests.reference writes it"
