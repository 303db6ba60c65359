"""The manifests, checked against Kubernetes' schemas and against the program."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from prefixcache.address import TcpAddress, UnixAddress
from prefixcache.config import ServeConfig
from prefixcache.sizes import parse_size
from tests.deploy.files import ALERTS, KUBERNETES, daemon_config, parse_command

PROGRAM_BYTES = 2**30
"""What a daemon needs beside its pool, torch included."""
UNCHECKED_KINDS = {"PodMonitor"}
"""Of the Prometheus operator, whose schemas are not Kubernetes' own."""


def documents() -> list[dict[str, Any]]:
    files = sorted(KUBERNETES.glob("*.yaml"))
    return list(chain.from_iterable(yaml.safe_load_all(path.read_text()) for path in files))


DOCUMENTS = {document["kind"]: document for document in documents()}
POD = DOCUMENTS["Deployment"]["spec"]["template"]
SPEC = POD["spec"]
DAEMON = next(c for c in SPEC["initContainers"] if c["name"] == "prefixcache")
ENGINE = next(c for c in SPEC["containers"] if c["name"] == "engine")
CONTAINERS = [*SPEC["initContainers"], *SPEC["containers"]]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container.get("env", ())}


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    path = tmp_path / "prefixcache.toml"
    path.write_text(DOCUMENTS["ConfigMap"]["data"][path.name])
    return daemon_config(DAEMON["args"], environment(DAEMON), path)


@pytest.mark.parametrize("document", documents(), ids=lambda document: document["kind"])
def test_the_manifests_have_kubernetes_schemas(document: dict[str, Any]) -> None:
    if document["kind"] in UNCHECKED_KINDS:
        assert document["apiVersion"] == "monitoring.coreos.com/v1"
        return
    newest = kubernetes_validate.latest_version()
    for version in ("1.30", newest):
        kubernetes_validate.validate(document, version, strict=True)


def test_names_within_the_manifests_agree() -> None:
    labels = POD["metadata"]["labels"]
    ports = {port["name"] for container in CONTAINERS for port in container.get("ports", ())}
    assert DOCUMENTS["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    policy, monitor = DOCUMENTS["NetworkPolicy"]["spec"], DOCUMENTS["PodMonitor"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} <= ports
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in ports
    (relabeling,) = endpoint["relabelings"]
    assert f'{relabeling["targetLabel"]}="{relabeling["replacement"]}"' in ALERTS.read_text()
    volumes = {volume["name"] for volume in SPEC["volumes"]}
    for container in CONTAINERS:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_daemon_serves_before_the_engine_starts_and_ends_after_it() -> None:
    assert DAEMON["restartPolicy"] == "Always"
    assert "startupProbe" in DAEMON
    names = [container["name"] for container in SPEC["initContainers"]]
    assert names.index("socket-folder") < names.index("prefixcache")


def test_only_metrics_are_reached_from_outside_the_pod(config: ServeConfig) -> None:
    (address,) = config.network.addresses
    assert isinstance(address, UnixAddress)
    metrics = config.metrics.address
    assert isinstance(metrics, TcpAddress)
    (port,) = DAEMON["ports"]
    assert port["containerPort"] == metrics.port
    _, rule = DOCUMENTS["NetworkPolicy"]["spec"]["ingress"]
    assert rule["from"]
    assert rule["ports"] == [{"protocol": "TCP", "port": port["name"]}]


def test_the_socket_lies_in_a_folder_of_its_own_and_all_know_where(config: ServeConfig) -> None:
    """An emptyDir itself may be written to by every user, and `serve` refuses such a folder."""
    (address,) = config.network.addresses
    assert isinstance(address, UnixAddress)
    for container in (DAEMON, ENGINE):
        assert environment(container)["PREFIXCACHE_TARGET"] == str(address)
    maker = SPEC["initContainers"][0]
    assert maker["command"] == ["install", "-d", "-m", "2750", address.folder]
    mounts = {
        mount["mountPath"]
        for container in (maker, DAEMON, ENGINE)
        for mount in container["volumeMounts"]
        if mount["name"] == "socket"
    }
    (mount,) = mounts
    assert Path(address.folder).parent == Path(mount)
    group = SPEC["securityContext"]["fsGroup"]
    assert DAEMON["securityContext"]["runAsGroup"] == group


@pytest.mark.parametrize("name", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_are_calls_of_the_program_that_end_in_time(name: str) -> None:
    probe = DAEMON[name]
    program, *words = probe["exec"]["command"]
    assert program == "prefixcache"
    assert words[0] == "health"
    assert parse_command(words)["timeout"] < probe["timeoutSeconds"]


def test_there_is_time_to_drain(config: ServeConfig) -> None:
    drain_s = config.process.drain_timeout
    engine_s = ENGINE["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert SPEC["terminationGracePeriodSeconds"] > engine_s + drain_s
    liveness = DAEMON["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > drain_s


def test_the_pool_fits_into_the_containers_memory(config: ServeConfig) -> None:
    resources = DAEMON["resources"]
    assert resources["requests"] == resources["limits"]
    limit = parse_size(resources["limits"]["memory"] + "B")
    assert config.pool.memory is not None
    assert config.pool.memory + PROGRAM_BYTES <= limit


def test_containers_are_restricted_as_pod_security_asks() -> None:
    assert SPEC["securityContext"]["runAsNonRoot"] is True
    assert SPEC["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in CONTAINERS:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
    for container in SPEC["initContainers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
