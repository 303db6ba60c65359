"""The image and the compose file, checked without Docker: by linters, and against the program."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixcache.address import SYSTEM_FOLDER, TcpAddress
from prefixcache.config import ServeConfig
from tests.deploy.dockerfile import Stage, read_stages
from tests.deploy.files import ALERTS, DOCKER, REPOSITORY, daemon_config, parse_command
from tests.test_build import SOURCES

DOCKERFILE = DOCKER / "Dockerfile"
COMPOSE = DOCKER / "compose.yaml"
ARGUMENTS, STAGES = read_stages(DOCKERFILE)
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
VARIANTS = ("cpu", "cuda")


def lint(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_linters_find_nothing_in_the_dockerfile_and_the_compose_file() -> None:
    lint("hadolint", "--no-color", str(DOCKERFILE))
    lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_stage_is_made_of_others_or_of_python(variant: str) -> None:
    assert ARGUMENTS["VARIANT"] in VARIANTS
    seen: set[str] = set()
    for stage in STAGES.values():
        parent = stage.parent.replace("${VARIANT}", variant)
        assert parent in seen or parent == "python:${PYTHON_VERSION}-slim-bookworm"
        seen.add(stage.name)
        for source in stage.all("COPY"):
            if source.startswith("--from="):
                assert source.split()[0].removeprefix("--from=") in seen


def test_the_image_has_a_python_that_the_package_takes() -> None:
    version = ARGUMENTS["PYTHON_VERSION"]
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]


def copied(stage: Stage) -> set[str]:
    """What a stage copies from the repository."""
    lines = [line for line in stage.all("COPY") if not line.startswith("--from=")]
    return {path for line in lines for path in line.split()[:-1]}


def test_what_is_copied_is_there_and_is_sent_to_the_builder() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = [rule[1:] for rule in rules if rule.startswith("!")]
    for stage in STAGES.values():
        for pattern in copied(stage):
            paths = list(REPOSITORY.glob(pattern))
            assert paths
            for path in paths:
                name = path.relative_to(REPOSITORY).parts[0]
                assert any(fnmatch(name, rule) for rule in sent), name


def test_the_wheel_is_built_of_all_that_it_needs_with_every_compiled_module() -> None:
    assert copied(STAGES["wheel"]) == {*SOURCES, "constraints.txt"}
    modules = PROJECT["tool"]["setuptools"]["ext-modules"]
    (run,) = STAGES["wheel"].all("RUN")
    assert f"< {len(modules)})" in run


def test_the_engine_has_what_the_demo_needs() -> None:
    (run,) = STAGES["engine"].all("RUN")
    names = {word for word in run.split() if re.fullmatch(r"[a-z0-9]+", word)}
    wanted = {
        re.match(r"\w+", line)[0] for line in PROJECT["project"]["optional-dependencies"]["demo"]
    }  # type: ignore[index]
    assert wanted <= names
    flag, value = STAGES["engine"].words("CMD")
    assert f'"{flag}"' in (REPOSITORY / "examples" / "demo.py").read_text()
    assert value == f"unix:{SYSTEM_FOLDER}/prefixcache.sock"


def test_the_daemon_is_the_default_and_runs_as_a_user_of_its_own() -> None:
    assert [*STAGES][-1] == "daemon"
    daemon, base = STAGES["daemon"], STAGES["base"]
    (user,) = daemon.all("USER")
    uid, _, gid = user.partition(":")
    assert int(uid) > 1000
    (run,) = base.all("RUN")
    assert f"--uid {uid} --gid {gid}" in run
    # Not every user may write there: the daemon takes its default socket.
    assert f"-o {uid} -g {gid} -m 2750 {SYSTEM_FOLDER} " in run
    assert SYSTEM_FOLDER in daemon.words("VOLUME")


def test_the_image_calls_the_program_as_it_is() -> None:
    daemon = STAGES["daemon"]
    assert daemon.words("ENTRYPOINT") == ["prefixcache"]
    assert daemon.words("CMD") == ["serve"]
    (check,) = daemon.all("HEALTHCHECK")
    program, *words = daemon.words("HEALTHCHECK")
    assert program == "prefixcache"
    assert words[0] == "health"
    seconds = re.search(r"--timeout=(\d+)s", check)
    assert seconds is not None
    assert parse_command(words)["timeout"] < int(seconds[1])
    assert daemon.all("STOPSIGNAL") == ["SIGTERM"]


def composed() -> ServeConfig:
    service = SERVICES["prefixcache"]
    return daemon_config(service["command"], service["environment"])


def test_the_composed_daemon_has_the_engines_layout_and_time_to_drain() -> None:
    config = composed()
    assert config.model.num_layers is not None
    grace = SERVICES["prefixcache"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > config.process.drain_timeout
    assert SERVICES["engine"]["depends_on"]["prefixcache"]["condition"] == "service_healthy"


def test_the_composed_images_and_files_are_there() -> None:
    for service in SERVICES.values():
        if "build" in service:
            assert service["build"]["target"] in STAGES
            assert (DOCKER / service["build"]["context"]).resolve() == REPOSITORY
            assert (REPOSITORY / service["build"]["dockerfile"]) == DOCKERFILE
        else:
            assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service["volumes"]:
            source, path, *_ = volume.split(":")
            if source.startswith("."):
                assert (DOCKER / source).is_file()
            else:
                assert path == SYSTEM_FOLDER


def test_prometheus_and_grafana_find_what_they_show() -> None:
    address = composed().metrics.address
    assert isinstance(address, TcpAddress)
    scrape = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"prefixcache:{address.port}"]}]
    assert f'job="{job["job_name"]}"' in ALERTS.read_text()
    mounted = {volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]}
    (provider,) = yaml.safe_load((DOCKER / "grafana-dashboards.yaml").read_text())["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounted
    assert home.startswith(provider["options"]["path"])
    (source,) = yaml.safe_load((DOCKER / "grafana-datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    networks = {name: set(service.get("networks", ())) for name, service in SERVICES.items()}
    assert "metrics" in networks["prefixcache"] & networks["prometheus"] & networks["grafana"]
