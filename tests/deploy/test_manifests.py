"""Flags, ports, probes and time limits of the manifests agree with the code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.main import get_command

from fd_core.cli.app import app
from fd_core.cli.settings.settings import RouteSettings, Settings, merge, merge_route
from fd_core.router.gateway.gate import PAGES
from fd_core.server.api.admin import router as health_pages
from tests.deploy.manifests import DEPLOY, FILES, NAMESPACE, Object, flag, matches, objects, of_kind, pods, programs

SECRET = "/etc/fd-core/secret/"
SERVED = {
    "serve": {route.path for route in health_pages.routes},
    "route": set(PAGES),
}


@pytest.fixture(params=FILES)
def found(request: pytest.FixtureRequest) -> list[Object]:
    return objects(request.param)


def named(found: list[Object], kind: str, name: str) -> Object:
    return next(each for each in of_kind(found, kind) if each["metadata"]["name"] == name)


def settings(name: str, container: Object, secrets: Path) -> Settings | RouteSettings:
    """Merge the settings like the command, with a file for every entry of the Secret."""
    variables = {"POD_NAME": f"{name}-0", "POD_NAMESPACE": NAMESPACE}
    typed = [arg.replace(SECRET, f"{secrets}/") for arg in container["args"]]
    for variable, value in variables.items():
        typed = [arg.replace(f"$({variable})", value) for arg in typed]
    assert "$(" not in " ".join(typed)
    verb, *rest = typed
    params = get_command(app).commands[verb].make_context(verb, rest).params  # type: ignore[attr-defined]
    model = params.pop("model", None)
    given = {field: value for field, value in params.items() if value not in (None, [], ())}
    return merge(model, given, {}) if verb == "serve" else merge_route(given, {})


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    for name in ("router-secret", "transfer-secret", "worker-key", "kv-store-secret", "redis-password"):
        (tmp_path / name).write_text(f"{name}-of-a-test\n")
    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "alice"\nkey = "sk-of-a-test"\n')
    return tmp_path


def test_every_command_line_is_valid(found: list[Object], secrets: Path) -> None:
    made = programs(found)
    assert any(container["args"][0] == "route" for _, container in made.values())
    for name, (_, container) in made.items():
        merged = settings(name, container, secrets)
        shared = merged.gateway if isinstance(merged, RouteSettings) else merged.server
        assert shared.router_secret and shared.host == "0.0.0.0"


def test_probes_use_existing_endpoints_and_the_listening_port(found: list[Object]) -> None:
    for _, container in programs(found).values():
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert str(ports["http"]) == flag(container, "--port")
        assert str(ports["health"]) == flag(container, "--health-port")
        assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "health"}
        assert container["startupProbe"]["httpGet"] == {"path": "/health", "port": "http"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
        assert {"/health", "/ready", "/metrics"} <= SERVED[container["args"][0]]


def test_pod_grace_period_covers_the_drain_timeout(found: list[Object], secrets: Path) -> None:
    for name, (pod, container) in programs(found).items():
        merged = settings(name, container, secrets)
        shared = merged.gateway if isinstance(merged, RouteSettings) else merged.server
        left = pod["spec"]["terminationGracePeriodSeconds"] - shared.drain_delay - shared.drain_seconds
        assert 10 <= left <= 60, name
        if container["args"][0] == "route":
            probe = container["readinessProbe"]
            assert shared.drain_delay >= 2 * probe["periodSeconds"] * probe["failureThreshold"]


def test_engine_may_start_again_before_its_container_is_killed(found: list[Object]) -> None:
    for _, container in programs(found).values():
        probe = container["livenessProbe"]
        start_seconds = probe["periodSeconds"] * probe["failureThreshold"]
        assert start_seconds >= (120 if container["args"][0] == "serve" else 30)


def test_every_port_has_one_service_and_every_service_a_pod(found: list[Object]) -> None:
    made = pods(found)
    for service in of_kind(found, "Service"):
        chosen = [pod for pod in made.values() if matches({"matchLabels": service["spec"]["selector"]}, labels(pod))]
        assert len(chosen) == 1, service["metadata"]["name"]
        ports = {each["name"]: each["containerPort"] for each in chosen[0]["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if service["spec"].get("clusterIP") == "None":  # nothing translates the port of a headless service
                assert port["port"] == ports[port["targetPort"]]


def labels(pod: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = pod["metadata"]["labels"]
    return found


def test_workers_register_at_every_router_under_a_unique_name(found: list[Object]) -> None:
    made = programs(found)
    ((router, (_, routing)),) = [each for each in made.items() if each[1][1]["args"][0] == "route"]
    admin = named(found, "Service", f"{router}-admin")["spec"]
    assert admin["clusterIP"] == "None" and admin["publishNotReadyAddresses"] is True
    assert admin["ports"][0]["port"] == int(flag(routing, "--admin-port") or 0)
    for name, (_, container) in made.items():
        if container["args"][0] == "route":
            continue
        assert flag(container, "--router") == f"http://{router}-admin.$(POD_NAMESPACE).svc:{admin['ports'][0]['port']}"
        own = named(found, "StatefulSet", name)["spec"]["serviceName"]
        service = named(found, "Service", own)["spec"]
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
        port = flag(container, "--port")
        assert flag(container, "--advertise-url") == f"http://$(POD_NAME).{own}.$(POD_NAMESPACE).svc:{port}"
        fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
        assert fields == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}


def test_both_sides_of_pairs_reach_each_other_and_the_store() -> None:
    found = objects("pairs")
    made = {flag(container, "--role"): container for _, container in programs(found).values()}
    assert made.keys() == {None, "mixed", "prefill", "decode"}
    prefill = named(found, "Service", "fd-core-prefill")["spec"]["ports"]
    assert flag(made["prefill"], "--transfer-host") == "0.0.0.0"
    assert [str(port["port"]) for port in prefill if port["name"] == "transfer"] == [
        flag(made["prefill"], "--transfer-port")
    ]
    secret = {flag(made[role], "--transfer-secret-file") for role in (None, "prefill", "decode")}
    assert secret == {SECRET + "transfer-secret"} and flag(made["mixed"], "--transfer-secret-file") is None
    redis = named(found, "Service", "fd-core-redis")["spec"]["ports"][0]["port"]
    for role in ("mixed", "prefill", "decode"):
        location = f"redis://fd@fd-core-redis.$(POD_NAMESPACE).svc:{redis}/0?password_file={SECRET}redis-password"
        assert flag(made[role], "--kv-store") == location


def test_pods_have_least_privileges(found: list[Object]) -> None:
    for name, pod in pods(found).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        # Otherwise a release called `fd` would give its servers FD_..._PORT, which fdcore could take for settings.
        assert spec["enableServiceLinks"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"]
        assert not [each for each in spec["volumes"] if "hostPath" in each]


def test_every_file_is_an_entry_of_the_only_mounted_secret(found: list[Object]) -> None:
    for name, (pod, container) in programs(found).items():
        (volume,) = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
        assert volume["defaultMode"] == 0o440, "fd_core refuses secrets that others may read"
        assert volume["items"] == [{"key": item["key"], "path": item["key"]} for item in volume["items"]]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "secret"]
        assert mount["mountPath"] + "/" == SECRET and mount["readOnly"] is True
        words = " ".join(container["args"])
        used = {item["key"] for item in volume["items"] if SECRET + item["key"] in words}
        assert used == {item["key"] for item in volume["items"]}, name
        assert words.count(SECRET) == len(used), f"{name} names a file that is not mounted"


def test_manifests_contain_no_secrets(found: list[Object]) -> None:
    assert not list(of_kind(found, "Secret"))


def test_processes_write_only_to_volumes(found: list[Object]) -> None:
    image = (DEPLOY / "Containerfile").read_text()
    for name, (pod, container) in programs(found).items():
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert "FD_CACHE=/var/cache/fd-core " in image and "/var/cache/fd-core" in mounts
        assert "/tmp" in mounts, "sockets of the engine's process are there"
        if container["args"][0] == "serve":
            claims = named(found, "StatefulSet", name)["spec"]["volumeClaimTemplates"]
            assert [each["metadata"]["name"] for each in claims] == [mounts["/var/cache/fd-core"]]
        known = {each["name"] for each in pod["spec"]["volumes"]} | {"cache"}
        assert set(mounts.values()) <= known


def test_at_most_one_pod_of_a_kind_is_evicted_at_a_time(found: list[Object]) -> None:
    budgets = [each["spec"] for each in of_kind(found, "PodDisruptionBudget")]
    for name, (pod, _) in programs(found).items():
        (budget,) = [each for each in budgets if matches(each["selector"], labels(pod))]
        assert budget["maxUnavailable"] == 1, name


def allowed(found: list[Object], one: str, other: str, port: int) -> bool:
    """Return True if the network policies allow the pods `one` to connect to a port of the pods `other`, by name."""
    made = pods(found)
    source, target = made[one], made[other]
    numbers = {each["name"]: each["containerPort"] for each in target["spec"]["containers"][0]["ports"]}

    def lets(rules: list[Object], side: str, peer: Object) -> bool:
        for rule in rules:
            ports = [numbers.get(each["port"], each["port"]) for each in rule["ports"]]
            peers = rule.get(side)
            here = peers is None or any(
                matches(each["podSelector"], labels(peer)) for each in peers if "podSelector" in each
            )
            if port in ports and here:
                return True
        return False

    policies = [each["spec"] for each in of_kind(found, "NetworkPolicy")]
    out = [
        each for each in policies if matches(each["podSelector"], labels(source)) and "Egress" in each["policyTypes"]
    ]
    into = [each for each in policies if matches(each["podSelector"], labels(target))]
    assert out and into
    leaves = any(lets(each.get("egress") or [], "to", target) for each in out)
    return leaves and any(lets(each.get("ingress") or [], "from", source) for each in into)


def test_network_policies_allow_required_connections_only() -> None:
    found = objects("pairs")
    workers = ("fd-core-mixed", "fd-core-prefill", "fd-core-decode")
    wanted = {
        *(("fd-core-router", worker, 8000) for worker in workers),
        *((worker, "fd-core-router", 8081) for worker in workers),
        *((worker, "fd-core-redis", 6379) for worker in workers),
        ("fd-core-decode", "fd-core-prefill", 9400),
    }
    every = {
        (one, other, port)
        for one in pods(found)
        for other, pod in pods(found).items()
        for port in (each["containerPort"] for each in pod["spec"]["containers"][0]["ports"])
        if one != other
    }
    assert {flow for flow in every if allowed(found, *flow)} == wanted
    (outsiders,) = [
        rule for policy in of_kind(found, "NetworkPolicy") for rule in policy["spec"]["ingress"] if not rule.get("from")
    ]
    assert outsiders == {"ports": [{"port": "http"}]}, "only the routers accept connections from everywhere"


def test_metrics_of_every_pod_are_scraped_once() -> None:
    found = objects("pairs")
    (monitor,) = of_kind(found, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    scraped = []
    for service in of_kind(found, "Service"):
        if matches(monitor["spec"]["selector"], service["metadata"]["labels"]):
            assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
            scraped += [
                name
                for name, pod in pods(found).items()
                if matches({"matchLabels": service["spec"]["selector"]}, labels(pod))
            ]
    assert sorted(scraped) == sorted(programs(found))
    assert all(endpoint["path"] in pages for pages in SERVED.values())


def test_autoscaled_workers_have_no_fixed_replicas() -> None:
    for name, kind in (("pairs", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")):
        found = objects(name)
        scaled = list(of_kind(found, kind))
        assert len(scaled) == len(programs(found)) - 1
        for each in scaled:
            target = each["spec"]["scaleTargetRef"]
            made = named(found, target["kind"], target["name"])
            assert "replicas" not in made["spec"], "an upgrade would set back what the autoscaler chose"
            least = each["spec"].get("minReplicas", each["spec"].get("minReplicaCount"))
            assert 1 <= least <= each["spec"].get("maxReplicas", each["spec"].get("maxReplicaCount"))
            behavior = (
                each["spec"].get("behavior") or (each["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"])
            )
            (policy,) = behavior["scaleDown"]["policies"]
            drained = made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] - 30
            assert policy == {"type": "Pods", "value": 1, "periodSeconds": drained}, "the next worker leaves after it"
