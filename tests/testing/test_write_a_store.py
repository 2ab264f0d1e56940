"""The store that the document writes passes the kit, found through its entry point as a user's would be."""

from tests.testing.documents import run_document


def test_the_plugin_of_the_document_passes_the_kit(tmp_path):
    assert "not tested: an SQLite file grows" in run_document("write-a-store.md", tmp_path)
