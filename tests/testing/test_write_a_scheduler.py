"""The guide to schedulers leads to one that passes the kit and serves, found through its entry point."""

import pytest

from tests.testing.documents import follow, run_line, serve

pytestmark = pytest.mark.guide


@pytest.mark.timeout(400)
def test_guide_leads_to_schedulers_that_pass_the_kit_and_serve(tmp_path):
    folder, outputs = follow("write-a-scheduler.md", tmp_path)
    _, checked, written, of_parts = (words for _, words in outputs)
    assert "fd-batches 0.1.0: batches" in checked
    for card in (written, of_parts):
        assert "batches passes" in card
    assert "a preempted request joins the next batch" in of_parts
    serve(folder, "scheduler", "batches")
    command = f"fdcore complete x --backend null --scheduler batches --kv-store disk:{tmp_path}/kv"
    assert "a preempted request joins the next batch" in run_line(folder, command, code=2)
