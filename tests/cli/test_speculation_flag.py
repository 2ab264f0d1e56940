"""`--speculative-config` becomes a drafter's settings, or says what is wrong with it."""

from __future__ import annotations

import pytest

from fd_core.cli.settings.flags import speculation
from fd_core.config import SpeculativeConfig


def test_fields_the_engine_does_not_know_go_to_the_drafter() -> None:
    read = speculation('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}')
    assert read == SpeculativeConfig(method="ngram", num_speculative_tokens=5, options={"prompt_lookup_max": 3})


def test_a_table_of_a_settings_file_is_read_as_well() -> None:
    assert speculation({"method": "suffix"}) == SpeculativeConfig(method="suffix")


@pytest.mark.parametrize("text", ["", "ngram", "[]", "{}", '{"method": 3}', '{"method": "ngram", "x": [1]}'])
def test_what_cannot_be_read_is_answered_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="an example is"):
        speculation(text)
