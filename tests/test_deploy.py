"""What lies in deploy/: checked by the tools it is made for, and started where that needs no cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.servers import free_port
from server.command.arguments import Options, parse_arguments
from ssd.replication.replication_log import ReplicationStats, StreamStats
from tests.server.bundled_engine import load_bundled
from tests.server.client import ask, get, wait_until
from tests.server.failing_engine import RunningServer, serving

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DRAIN_S = 30
"""What requests under way have by default."""
KEY = "a-key"
AUTHORISED = {"authorization": f"Bearer {KEY}"}
SPECULATION = {
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "ssd:source_draft_tokens_total",
    "ssd:source_accepted_tokens_total",
}
"""Exported once a draft was accepted; on a machine where others compute that may take its time."""
METRIC = re.compile(r"\b(?:(?:ssd|vllm):[a-z0-9_]+|process_[a-z_]+|http_requests_total)")


def tool(name: str) -> str:
    """The path of a program; the test is skipped without it."""
    found = shutil.which(name) or shutil.which(str(Path(sys.executable).with_name(name)))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str, **options: Any) -> str:
    """What a checker prints; it must find nothing wrong."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- dashboard and alerts ------------------------------------------------------------------------------------------


def panels() -> dict[str, list[str]]:
    """Expressions by panel, with every variable at a value."""
    content = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    names = [variable["name"] for variable in content["templating"]["list"]]
    found = {}
    for panel in content["panels"]:
        expressions = [target["expr"].replace("$__rate_interval", "1m") for target in panel.get("targets", ())]
        for name in names:
            expressions = [expression.replace(f"${name}", ".*") for expression in expressions]
        if expressions:
            assert panel["title"] not in found and panel["description"].endswith(".")
            found[panel["title"]] = expressions
    return found


def alerts() -> dict[str, str]:
    """Expressions by alert."""
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def expressions() -> list[str]:
    return [expression for each in panels().values() for expression in each] + list(alerts().values())


def sharing_stats() -> dict[str, ReplicationStats]:
    """Of a server whose Redis answers and has nothing to say."""
    nothing: dict[str, Any] = dict.fromkeys(ReplicationStats.__dataclass_fields__, 0)
    return {"default": ReplicationStats(**nothing | {"is_connected": True, "streams": {"default": StreamStats()}})}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(load_bundled, sharing_stats=sharing_stats, api_keys=(KEY,)) as running:
        yield running


def ask_of_all_kinds(server: RunningServer) -> None:
    """Traffic that every panel has something to show of."""
    repeats = {"prompt": [7, 8, 9] * 20, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    for body, status in ((repeats, 200), (repeats, 200), ({"prompt": "a", "n": 0}, 400)):
        assert ask(server.port, "POST", "/v1/completions", body, headers=AUTHORISED).status == status


def test_every_metric_that_is_drawn_or_watched_is_exported(server: RunningServer) -> None:
    used = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(used) > 40

    def missing() -> set[str]:
        ask_of_all_kinds(server)
        text = get(server.port, "/metrics").content.decode()
        return used - {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}

    wait_until(lambda: missing() <= SPECULATION)
    assert missing() <= SPECULATION


def test_whatever_tells_that_sharing_is_slow_or_loses_is_documented_drawn_and_watched() -> None:
    page = (ROOT / "docs" / "guides" / "sharing.md").read_text()
    for name in ("stream_lag_seconds", "queued", "dropped_total", "connected", "invalid_total"):
        name = f"replication_{name}"
        assert f"`ssd:{name}" in page
        for where in (panels().values(), [[each] for each in alerts().values()]):
            assert any(f"ssd:{name}" in expression for each in where for expression in each), name


def test_every_number_of_sharing_is_documented() -> None:
    page = (ROOT / "docs" / "guides" / "sharing.md").read_text()
    names = {name.removeprefix("num_").removeprefix("is_") for name in ReplicationStats.__dataclass_fields__} - {
        "streams"
    }
    (row,) = re.findall(r"replication_{(published[a-z_,]+)}", page)
    (failures,) = re.findall(r"replication_{(failures[a-z_,]+)}", page)
    alone = re.findall(r"`ssd:replication_([a-z]+?)(?:_total)?`", page)
    assert {*row.split(","), *failures.split(","), *alone} == names


def test_expressions_are_promql() -> None:
    parser = pytest.importorskip("promql_parser")
    for expression in expressions():
        parser.parse(expression)


def test_alerts_are_what_prometheus_takes() -> None:
    assert "SUCCESS" in run(tool("promtool"), "check", "rules", str(DEPLOY / "alerts.yaml"))


# -- container -----------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments of each line of the container file, continued lines joined."""
    text = (DEPLOY / "Containerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def options_of(arguments: list[str], **environment: str) -> Options:
    return parse_arguments(arguments, environment)


def test_the_container_file_is_without_fault() -> None:
    run(tool("hadolint"), "--failure-threshold", "warning", str(DEPLOY / "Containerfile"))


def test_the_container_runs_a_server_as_nobody_in_particular() -> None:
    found = dict(instructions())
    assert int(found["USER"]) > 0
    program, *arguments = json.loads(found["ENTRYPOINT"])
    options = options_of(arguments)
    assert (program, options.network.host, options.network.port) == ("ssd-serve", "0.0.0.0", int(found["EXPOSE"]))
    assert str(options.cache.config.directory).startswith(found["VOLUME"])
    (extras,) = [line.removeprefix("EXTRAS=") for kind, line in instructions() if kind == "ARG" and "EXTRAS" in line]
    assert set(extras.split(",")) <= set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )


def test_what_the_container_copies_is_there_and_not_kept_out() -> None:
    copied = [name for kind, rest in instructions() if kind == "COPY" for name in rest.split()[:-1]]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    names = {name for name in copied if not name.startswith(("-", "/"))}
    assert names == kept and all((ROOT / name).exists() for name in names)


def test_the_container_s_health_check_sees_health(server: RunningServer) -> None:
    check = dict(instructions())["HEALTHCHECK"].split("CMD", 1)[1]
    python, *arguments = json.loads(check)
    assert python == "python"

    def status(port: int) -> int:
        command = [sys.executable, *(argument.replace(":8000", f":{port}") for argument in arguments)]
        return subprocess.run(command, capture_output=True, timeout=30).returncode

    assert status(server.port) == 0 and status(free_port()) != 0


# -- systemd -------------------------------------------------------------------------------------------------------


def unit_file(directory: Path) -> Path:
    """The unit with a program that is here."""
    text = (DEPLOY / "ssd-serve.service").read_text().replace("/opt/ssd/bin/ssd-serve", "/bin/true")
    (directory / "ssd-serve.service").write_text(text)
    return directory / "ssd-serve.service"


def setting(name: str) -> str:
    (found,) = re.findall(rf"^{name}=(.*)$", (DEPLOY / "ssd-serve.service").read_text(), re.MULTILINE)
    return str(found)


def test_systemd_takes_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    program = tool("systemd-analyze")
    assert run(program, "verify", "--man=no", str(unit_file(tmp_path))) == ""
    security = run(program, "security", "--offline=true", "--no-pager", str(unit_file(tmp_path)))
    assert int(setting("TimeoutStopSec")) >= DRAIN_S + 10
    assert (setting("KillSignal"), setting("KillMode"), setting("RestartPreventExitStatus")) == (
        "SIGTERM",
        "mixed",
        "2",
    )
    assert float(security.rsplit("service: ", 1)[1].split()[0]) < 2  # of 10, which is a service that may do anything


# -- Kubernetes ----------------------------------------------------------------------------------------------------


def resources() -> dict[tuple[str, str], Any]:
    """By kind and name."""
    found = [each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if each is not None]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pod(kind: str, name: str) -> Any:
    return resources()[kind, name]["spec"]["template"]["spec"]


def test_the_manifest_is_what_kubernetes_takes() -> None:
    checker = pytest.importorskip("kubernetes_validate")
    for resource in resources().values():
        checker.validate(resource, checker.latest_version(), strict=True)


def test_the_manifest_fits_the_server(server: RunningServer) -> None:
    spec = pod("StatefulSet", "ssd")
    assert spec["terminationGracePeriodSeconds"] >= DRAIN_S + 10
    (container,) = spec["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert get(server.port, container[probe]["httpGet"]["path"]).status == 200
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"  # a server that is loading is not to be killed
    _, *arguments = json.loads(dict(instructions())["ENTRYPOINT"])
    given = {"redis-url": "redis://:p@ssd-redis:6379/0", "server-secret": "0123456789abcdef"}
    environment = {each["name"]: given[each["valueFrom"]["secretKeyRef"]["key"]] for each in container["env"]}
    options = options_of([*arguments, *container["args"]], **environment)
    assert options.cache.config.redis_url == given["redis-url"]
    assert options.service.secret == given["server-secret"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert str(options.service.api_key_file).startswith("/etc/ssd/") and "/etc/ssd" in mounts
    claims = [claim["metadata"]["name"] for claim in resources()["StatefulSet", "ssd"]["spec"]["volumeClaimTemplates"]]
    assert mounts[dict(instructions())["VOLUME"]] in claims
    assert container["ports"][0]["containerPort"] == options.network.port
    assert spec["securityContext"]["runAsUser"] == int(dict(instructions())["USER"])


def test_nothing_runs_as_root_and_no_secret_is_in_the_manifest() -> None:
    for kind, name in (("StatefulSet", "ssd"), ("Deployment", "ssd-redis")):
        spec = pod(kind, name)
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not any(kind == "Secret" for kind, _ in resources())
