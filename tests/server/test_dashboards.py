"""Dashboards and alerts ask for what a running server has; the real Prometheus loads and answers all of it where there is one."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fake_engine import STATS
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer, start_server

from foretoken.server.metrics import Metrics

DOCKER = Path(__file__).parents[2] / "docker"
PROMETHEUS = DOCKER / "prometheus"
DASHBOARDS = sorted((DOCKER / "grafana" / "dashboards").glob("*.json"))
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SPECULATION = json.dumps([NGRAM | {"adaptive": False}, {"method": "suffix"}])  # it guesses on a busy machine too
ADDED_BY_PROMETHEUS = {"job", "instance"}
STARTED_WITHIN_S = 30.0

# PromQL, as far as its names go. Every pattern ends where it may not go on, so that none has a way to try twice.
STRING = re.compile(r'"[^"]*"')
SELECTOR = re.compile(r"\{([^{}]*)\}")
MATCHER = re.compile(r"(\w+)\s*(?:!~|!=|=~|=)")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
RANGE = re.compile(r"\[[^\[\]]*\]")
NAME = re.compile(r"[A-Za-z_:][\w:]*+(?!\s*\()")
OPERATORS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right", "inf", "nan"}


def names_of(expression: str) -> tuple[set[str], set[str]]:
    """(metrics, labels) that a PromQL expression asks for."""
    bare = STRING.sub('""', expression)
    labels = {label for inside in SELECTOR.findall(bare) for label in MATCHER.findall(inside)}
    labels |= {label.strip() for inside in GROUPING.findall(bare) for label in inside.split(",") if label.strip()}
    rest = GROUPING.sub(" ", RANGE.sub(" ", SELECTOR.sub(" ", bare)))
    return {name for name in NAME.findall(rest) if name.lower() not in OPERATORS}, labels


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def asked_by(path: Path) -> list[str]:
    """Every expression of a dashboard, those of its variables too, with the variables at their widest."""
    board = json.loads(path.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            inside = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
            metric, _, label = inside.rpartition(",")
            asked.append(f"count by ({label.strip()}) ({metric})")
    for name, value in {"$model_name": ".*", "$proposer": ".*", "$__rate_interval": "1m", "$__range": "30m"}.items():
        asked = [expression.replace(name, value) for expression in asked]
    assert not any("$" in expression for expression in asked)
    return asked


def asked_by_alerts() -> list[str]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


ASKED = sorted({*asked_by_alerts(), *(expression for path in DASHBOARDS for expression in asked_by(path))})


@pytest.fixture(scope="module")
def server(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It has answered a request whose guesses were accepted, and refused one."""
    folder = tmp_path_factory.mktemp("dashboards")
    arguments = [str(tiny_target), "--served-model-name", "tiny", "--speculative-config", SPECULATION]
    running = start_server(arguments, folder / "log", FORETOKEN_CACHE=str(folder / "cache"))
    running.complete("one two one two one two", max_tokens=64, ignore_eos=True)
    with running.client() as client:
        assert client.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
    yield running
    running.stop()


@pytest.fixture(scope="module")
def told(server: RunningServer) -> dict[str, set[str]]:
    """Sample name -> its labels, of the running server. A speed-up is told once one is known: its name is from the renderer."""
    known = Metrics(lambda: replace(STATS, estimated_speedup=1.5), "tiny", ()).render().decode()
    found: dict[str, set[str]] = {"up": set()}
    for text in (httpx.get(server.url + "/metrics").text, known):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if text is not known or sample.name == "foretoken:estimated_speedup":
                    found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_names_are_found_in_expressions() -> None:
    text = 'sum by (le, job) (rate(a:b_total{x=~"c.*", y!="{d}"}[5m])) / on (z) group_left () max_over_time(e[1h]) > bool 0 and up{}'
    assert names_of(text) == ({"a:b_total", "e", "up"}, {"le", "job", "x", "y", "z"})


@pytest.mark.parametrize("expression", ASKED)
def test_a_running_server_has_what_is_asked_for(told: dict[str, set[str]], expression: str) -> None:
    metrics, labels = names_of(expression)
    assert metrics, expression
    assert metrics <= set(told)
    assert labels <= ADDED_BY_PROMETHEUS.union(*(told[metric] for metric in metrics))


def test_the_economics_are_all_shown() -> None:
    shown = {name for path in DASHBOARDS for expression in asked_by(path) for name in names_of(expression)[0]}
    kinds = ("drafts", "draft_tokens", "accepted_tokens", "wasted_tokens", "draft_seconds", "verify_seconds", "failures")
    wanted = {f"foretoken:proposer_{kind}_total" for kind in kinds}
    wanted |= {"foretoken:estimated_speedup", "foretoken:mean_draft_ceiling", "foretoken:speculation_off_reason"}
    assert wanted <= shown
    lengths = [expression for expression in ASKED if "histogram_quantile" in expression and "mean_accepted_length" in expression]
    # Prometheus takes what lies in the first bucket for spread from 0 on: half of requests without an accepted guess had 0.5 tokens.
    assert lengths and all(re.fullmatch(r"clamp_min\(.*, 1\)", expression) for expression in lengths)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_what_grafana_takes(path: Path) -> None:
    board = json.loads(path.read_text(encoding="utf-8"))
    assert board["schemaVersion"] >= 39 and "id" not in board and board["uid"] and board["title"]
    assert {"datasource", "model_name"} <= {variable["name"] for variable in board["templating"]["list"]}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        places = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and taken.isdisjoint(places), panel["title"]
        taken |= places
    for panel in panels(board):
        assert panel["datasource"]["uid"] == "${datasource}" and panel["title"] and panel["targets"]
        assert [target["refId"] for target in panel["targets"]] == [chr(ord("A") + i) for i in range(len(panel["targets"]))]


def test_acceptance_has_lines_at_the_two_thresholds() -> None:
    board = json.loads((DOCKER / "grafana" / "dashboards" / "speculation.json").read_text(encoding="utf-8"))
    (panel,) = (panel for panel in panels(board) if panel["title"] == "Acceptance rate" and panel["type"] == "timeseries")
    defaults = panel["fieldConfig"]["defaults"]
    assert [step["value"] for step in defaults["thresholds"]["steps"]] == [None, 0.6, 0.7]
    assert defaults["custom"]["thresholdsStyle"]["mode"] == "dashed"


def test_compose_mounts_what_there_is() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounted = [mount.split(":")[0] for service in services.values() for mount in service["volumes"] if mount.startswith("./")]
    assert mounted and all((DOCKER / mount).is_dir() for mount in mounted)
    assert (DOCKER / ".." / services["foretoken"]["build"]["dockerfile"]).is_file()
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).name in {path.name for path in DASHBOARDS}


def tool(name: str) -> str:
    """promtool, or the prometheus beside it; PROMTOOL may say where. Skips the test where there is none."""
    promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: install Debian's package prometheus, or name the program in PROMTOOL")
    found = shutil.which(str(Path(promtool).with_name(name)))
    if found is None:
        pytest.skip(f"no {name} beside {promtool}")
    return found


def promtool(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("promtool"), *arguments], input=stdin, capture_output=True, text=True, timeout=60, cwd=PROMETHEUS)


def test_promtool_takes_the_config_and_every_alert_fires_when_it_should() -> None:
    for arguments in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts.test.yml")):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    tried = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text(encoding="utf-8"))["tests"]
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    fired = {test["alertname"] for group in tried for test in group["alert_rule_test"] if test.get("exp_alerts")}
    assert fired == {rule["alert"] for group in groups for rule in group["rules"]}


def test_promtool_finds_nothing_in_the_metrics_but_vllms_colons(server: RunningServer) -> None:
    text = httpx.get(server.url + "/metrics").text
    complaints = promtool("check", "metrics", stdin=text).stderr.splitlines()
    assert complaints and all("should not contain ':'" in line for line in complaints), complaints
    done = promtool("check", "metrics", stdin=text.replace("vllm:", "vllm_").replace("foretoken:", "foretoken_"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_prometheus_scrapes_the_server_and_answers_every_expression(server: RunningServer, tmp_path: Path) -> None:
    program = tool("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    text = httpx.get(server.url + "/metrics").text
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=30) as client:
            deadline = time.monotonic() + STARTED_WITHIN_S

            def rows(expression: str) -> list[Any] | None:
                """The answer; None while there is no Prometheus yet."""
                try:
                    body = client.post("/query", data={"query": expression}).json()
                except (httpx.TransportError, ValueError):
                    return None
                assert body["status"] == "success", f"{expression}: {body}"
                return body["data"]["result"]

            # Rates need two scrapes, and something that happened between them.
            while not (found := rows("rate(vllm:generation_tokens_total[1m]) > 0")):
                assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()
                if found is not None:
                    server.complete("one two one two one two", max_tokens=64, ignore_eos=True)
                time.sleep(0.5)
            empty = {expression for expression in ASKED if not rows(expression)}
            stored = client.get("/label/__name__/values").json()["data"]
            rules = client.get("/rules").json()["data"]["groups"]
    finally:
        process.terminate()
        process.wait(30)
    assert {re.split("[{ ]", line)[0] for line in text.splitlines() if line[0] != "#"} <= set(stored)
    health = {rule["name"]: rule["health"] for group in rules for rule in group["rules"]}
    assert set(health.values()) <= {"ok", "unknown"} and len(health) == len(asked_by_alerts())
    unknown_speedup = {expression for expression in ASKED if "estimated_speedup" in expression}
    quiet = {*asked_by_alerts(), *(e for e in ASKED if 'status=~"5.."' in e)} | unknown_speedup  # nothing is wrong here
    assert empty <= quiet
