"""The connector that the document writes passes the kit, found through its entry point as a user's would be."""

import pytest

from tests.testing.documents import run_document

pytestmark = pytest.mark.slow


def test_the_plugin_of_the_document_passes_the_kit(tmp_path):
    run_document("write-a-connector.md", tmp_path)
