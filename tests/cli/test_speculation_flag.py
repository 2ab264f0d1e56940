"""`--speculative-config` is parsed into a drafter's settings, or rejected with the reason."""

from __future__ import annotations

import pytest

from fd_core.cli.settings.flags import speculation
from fd_core.config import SpeculativeConfig


def test_unknown_fields_are_passed_to_the_drafter() -> None:
    read = speculation('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}')
    assert read == SpeculativeConfig(method="ngram", num_speculative_tokens=5, options={"prompt_lookup_max": 3})


def test_table_of_a_settings_file_is_accepted() -> None:
    assert speculation({"method": "suffix"}) == SpeculativeConfig(method="suffix")


@pytest.mark.parametrize("text", ["", "ngram", "[]", "{}", '{"method": 3}', '{"method": "ngram", "x": [1]}'])
def test_unreadable_value_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="for example"):
        speculation(text)
