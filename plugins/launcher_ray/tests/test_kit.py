"""The launcher kit, with Ray on three nodes, and tests that need several nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fd_core.launching.contract import NODE_LOST, Launcher, LaunchError
from fd_core.testing.launchers import LauncherSuite
from needs import needs_ray

from fd_launcher_ray import launcher

HIDDEN = "hidden-from-the-files-of-ray"
DRIVER = """
from test_kit import TestRay
from fd_launcher_ray.launcher import RayLauncher
kit = TestRay()
(process,) = RayLauncher().start([kit.spec("one")])
print(kit.seen(process)["pid"], flush=True)
input()
"""


@needs_ray
class TestRay(LauncherSuite):
    launcher = "ray"

    @pytest.fixture(autouse=True)
    def _nodes(self, cluster: Any) -> None:
        """Check that the kit runs on three nodes."""

    def test_group_is_packed_or_spread(self, launching: Launcher) -> None:
        packed = launching.start([self.spec(name, group="ranks") for name in ("a", "b")])
        assert len({process.node for process in packed}) == 1
        spread = launching.start([self.spec(name, group="workers", spread=True) for name in ("c", "d", "e")])
        assert len({process.node for process in spread}) > 1

    def test_impossible_request_is_not_passed_to_ray(
        self, launching: Launcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launching.start([self.spec("one", cores=2)])
        monkeypatch.setattr(launcher, "PlacedGroup", None)
        with pytest.raises(LaunchError, match=r"need 3 CPUs.*nodes with up to 2"):
            launching.start([self.spec("two", cores=3)])
        with pytest.raises(LaunchError, match=r"need 6 CPUs.*4 CPUs"):
            launching.start([self.spec(name, cores=2) for name in ("two", "three", "four")])

    def test_ray_writes_no_secrets_into_its_files(self, launching: Launcher, cluster: Any) -> None:
        (process,) = launching.start([self.spec("one", secrets={"FD_SUITE_KEY": HIDDEN})])
        assert self.seen(process)["environment"] == {"FD_SUITE_KEY": HIDDEN}
        files = [path for path in Path(cluster.head_node.get_logs_dir_path()).rglob("*") if path.is_file()]
        assert len(files) > 5 and not [path for path in files if HIDDEN.encode() in path.read_bytes()]

    def test_processes_end_with_their_launcher(self) -> None:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent
        )
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        self.until(lambda: not Path(f"/proc/{pid}").exists())

    def test_lost_node_is_detected_and_named(self, launching: Launcher, cluster: Any) -> None:
        node = cluster.add_node(num_cpus=8, node_ip_address="127.0.0.1", include_dashboard=False)
        try:
            (process,) = launching.start([self.spec("one", cores=5)])  # more than the other nodes have
            assert process.node == node.node_id
            pid = self.seen(process)["pid"]
        finally:
            cluster.remove_node(node, allow_graceful=False)
        assert process.wait(self.patience) == NODE_LOST
        assert process.node in process.reason() and "was lost with its node" in process.reason()
        assert [each.alive for each in launching.nodes() if each.id == process.node] == [False]
        self.until(lambda: not Path(f"/proc/{pid}").exists())
