"""Metrics: what a scrape finds on both engines, while actors are down, and what dashboards and docs say of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorvine.actors import Publisher, Repository
from tensorvine.actors.engine.engine import Engine
from tensorvine.actors.updates.follower import Follower
from tensorvine.clusters.cli import metrics as command
from tensorvine.clusters.metrics import collect, exposition
from tensorvine.clusters.metrics.server import MetricsServer
from tensorvine.store.errors import CodecUnavailableError, ModelNotFoundError, OptionError, TensorVineError
from tensorvine.store.graphs.graph import Layer, ModelGraph
from tensorvine.store.metrics import METRICS, Kind

from tests.support.actors import planner_pid, restart_planner
from tests.support.commands import on, run
from tests.support.waiting import PROMPT_S, eventually

ROOT = Path(__file__).parents[3]
GRAPH = ModelGraph([Layer("in", {"class": "Input"}, (), ("w",))])
PROMETHEUS = shutil.which("prometheus") or "/usr/bin/prometheus"
Values = dict[tuple[str, str], float]


class Tagged:
    """A model that refuses negative numbers."""

    def assign(self, given: dict[str, np.ndarray]) -> None:
        if given["w"].min() < 0:
            raise ValueError("expected numbers from 0")

    def __call__(self, batch: Any) -> int:
        return 1


def values_of(text: bytes) -> Values:
    """Read what Prometheus would: (name, values of labels joined by commas) -> value."""
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def reported(*clients: Repository) -> None:
    """Send what clients counted, as they do every 15 s, and wait until the planner has it."""

    def took(client: Repository) -> bool:
        answer = client._session._reporting.send()
        return answer is not None and answer.result(PROMPT_S) is None

    for client in clients:
        eventually(partial(took, client), "the planner takes counts", ignoring=(TensorVineError,))


@pytest.mark.both_engines
class TestScrape:
    def test_it_finds_what_clients_and_shards_did(self, repository: Repository) -> None:
        arrays = {"w": np.ones(1000)}
        repository.save("m", arrays, graph=GRAPH)
        repository.save("m", arrays)
        for _ in range(3):
            repository.load("m")
        with pytest.raises(ModelNotFoundError):
            repository.load("none")
        match = repository.longest_prefix(GRAPH)
        assert match is not None
        match.release()
        assert repository.longest_prefix(ModelGraph([Layer("other", {"class": "Other"}, (), ())])) is None
        reported(repository)
        found = values_of(collect(repository))
        known = {
            ("tensorvine_up", "planner"): 1.0,
            ("tensorvine_up", "shard-0"): 1.0,
            ("tensorvine_save_seconds_count", ""): 2.0,
            ("tensorvine_saved_bytes_total", "written"): 8000.0,
            ("tensorvine_saved_bytes_total", "inherited"): 8000.0,
            ("tensorvine_load_seconds_count", ""): 3.0,
            ("tensorvine_loaded_bytes_total", "shared"): 24000.0,
            ("tensorvine_errors_total", "ModelNotFoundError,load"): 1.0,
            ("tensorvine_query_seconds_count", ""): 2.0,
            ("tensorvine_queries_total", "found"): 1.0,
            ("tensorvine_queries_total", "none"): 1.0,
            ("tensorvine_catalog_models", ""): 2.0,
            ("tensorvine_shard_commit_seconds_count", "0"): 2.0,
            ("tensorvine_shard_saved_bytes_total", "0"): 8000.0,
            ("tensorvine_clients", ""): 1.0,
            ("tensorvine_planner_restarts_total", ""): 0.0,
        }
        assert {key: found.get(key) for key in known} == known
        hits = found["tensorvine_load_lookups_total", "hit"]
        assert hits + found["tensorvine_load_lookups_total", "miss"] == 3.0
        assert any(key[0] == "tensorvine_repository_info" and repository.name in key[1] for key in found)
        reported(repository)
        assert values_of(collect(repository))["tensorvine_save_seconds_count", ""] == 2.0

    def test_it_finds_what_a_training_and_a_consumer_did(self, repository: Repository) -> None:
        client = Repository.connect(repository.name)
        follower = Follower(client, "net", Tagged)
        try:
            with Publisher(repository, "net", schedule=1000) as publisher:
                for value in (1.0, 2.0, -3.0):
                    saved = publisher.publish({"w": np.full(10, value)}).committed()
                    if value > 0:
                        follower.wait_for(saved.ref.version, PROMPT_S)
                eventually(lambda: follower.status().refused, "the last version is refused")
            follower.infer(0)
            reported(repository, client)
            found = values_of(collect(repository))
        finally:
            follower.close()
        known = {
            ("tensorvine_update_pause_seconds_count", ""): 3.0,
            ("tensorvine_update_commit_seconds_count", ""): 3.0,
            ("tensorvine_push_seconds_count", ""): 1.0,
            ("tensorvine_fetch_seconds_count", ""): 2.0,
            ("tensorvine_swap_seconds_count", ""): 2.0,
            ("tensorvine_answer_seconds_count", ""): 1.0,
            ("tensorvine_versions_refused_total", ""): 1.0,
            ("tensorvine_versions_superseded_total", ""): 0.0,
            ("tensorvine_consumers", ""): 1.0,
            ("tensorvine_consumer_lag_versions", ""): 1.0,
            ("tensorvine_trainings", ""): 1.0,
        }
        assert {key: found.get(key) for key in known} == known
        assert found["tensorvine_consumer_staleness_seconds", ""] > 0.0
        gone = values_of(collect(repository))
        assert gone["tensorvine_consumers", ""] == 0.0
        assert gone["tensorvine_answer_seconds_count", ""] == 1.0

    def test_a_client_that_is_closed_has_reported_all(self, repository: Repository) -> None:
        with Repository.connect(repository.name) as client:
            client.save("m", {"w": np.ones(10)})
        assert values_of(collect(repository))["tensorvine_save_seconds_count", ""] == 1.0

    def test_a_restarted_planner_is_counted_and_begins_at_zero(self, repository: Repository) -> None:
        repository.save("m", {"w": np.ones(10)})
        reported(repository)
        restart_planner(repository)
        repository.save("m", {"w": np.zeros(10)})
        reported(repository)
        found = values_of(collect(repository))
        assert found["tensorvine_planner_restarts_total", ""] == 1.0
        assert found["tensorvine_save_seconds_count", ""] == 1.0
        assert found["tensorvine_catalog_models", ""] == 2.0

    def test_a_planner_that_does_not_answer_is_down_and_its_metrics_are_left_out(self, repository: Repository) -> None:
        planner = planner_pid(repository)
        os.kill(planner, signal.SIGSTOP)
        try:
            found = values_of(collect(repository))
        finally:
            os.kill(planner, signal.SIGCONT)
        assert found["tensorvine_up", "planner"] == 0.0
        assert found["tensorvine_up", "shard-0"] == 1.0
        assert found["tensorvine_catalog_models", ""] == 0.0
        assert not [name for name, _ in found if name.startswith(("tensorvine_save_", "tensorvine_shards"))]


class TestServer:
    def read(self, server: MetricsServer) -> Values:
        with urllib.request.urlopen(server.address, timeout=PROMPT_S) as answer:  # noqa: S310  of this machine
            assert answer.headers["Content-Type"].startswith("text/plain")
            return values_of(answer.read())

    def test_it_survives_a_repository_that_restarts_under_it(self, cluster: Engine) -> None:
        name = "metrics-again"
        first = Repository.start(name, shards=1, preallocate_bytes=0)
        with MetricsServer(lambda: Repository.connect(name), 0) as server:
            first.save("m", {"w": np.ones(3)})
            assert self.read(server)["tensorvine_catalog_models", ""] == 1.0
            first.close()
            eventually(lambda: self.read(server)["tensorvine_up", "planner"] == 0.0, "it is reported as down")
            with Repository.start(name, shards=1, preallocate_bytes=0):
                eventually(lambda: self.read(server)["tensorvine_up", "planner"], "it connects again")
                assert self.read(server)["tensorvine_catalog_models", ""] == 0.0

    def test_a_port_that_is_taken_is_an_error_that_names_it(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(OptionError, match=f"127.0.0.1:{port}"):
                MetricsServer(lambda: pytest.fail("not reached"), port)

    def test_without_prometheus_client_an_error_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(CodecUnavailableError, match=r"\[web\]"):
            exposition.text_of(dict)

    def test_prometheus_scrapes_it(self, repository: Repository, tmp_path: Path) -> None:
        if not Path(PROMETHEUS).exists():
            pytest.skip("needs Debian's package prometheus: apt-get install prometheus")
        repository.save("m", {"w": np.ones(10)})
        reported(repository)
        with (
            MetricsServer(lambda: Repository.connect(repository.name), 0) as server,
            prometheus(server, tmp_path) as at,
        ):
            assert eventually(lambda: asked(at, 'tensorvine_up{actor="planner"}'), "a scrape") == 1.0
            assert eventually(lambda: asked(at, "tensorvine_save_seconds_count"), "a count") == 1.0
            for query in sorted(queries_of_the_dashboard()):
                asked(at, query.replace("$__rate_interval", "1m"))  # raises where it is none


class TestCommand:
    def test_it_serves_until_ctrl_c(self, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
        port, found = free_port(), list[Values]()

        class Event:
            """Instead of a wait: a scrape, and then Ctrl-C."""

            def wait(self, _: float) -> bool:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PROMPT_S) as answer:
                    found.append(values_of(answer.read()))
                raise KeyboardInterrupt

        monkeypatch.setattr(command, "threading", SimpleNamespace(Event=Event))
        code, out, _ = on(repository, "metrics", "--port", str(port))
        assert (code, out) == (0, f"Metrics of repository {repository.name}: http://127.0.0.1:{port}/metrics\n")
        assert found[0]["tensorvine_up", "planner"] == 1.0

    def test_it_prints_the_dashboard(self) -> None:
        code, out, _ = run("metrics", "--dashboard")
        assert code == 0
        assert json.loads(out) == json.loads((ROOT / "clusters/metrics/dashboard.json").read_text())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def asked(at: str, query: str) -> float | None:
    """Ask Prometheus; return the first value, if there is one."""
    url = f"{at}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=PROMPT_S) as answer:  # noqa: S310  of this machine
        rows = json.load(answer)["data"]["result"]
    return float(rows[0]["value"][1]) if rows else None


class prometheus:  # noqa: N801  used as a function
    """A Prometheus that scrapes a server every second, until the end of `with`."""

    def __init__(self, server: MetricsServer, folder: Path) -> None:
        self._port = free_port()
        target = server.address.removeprefix("http://").removesuffix("/metrics")
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\nscrape_configs:\n"
            f"- {{job_name: tensorvine, static_configs: [{{targets: ['{target}']}}]}}\n"
        )
        self._words = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        self._words.append(f"--web.listen-address=127.0.0.1:{self._port}")

    def __enter__(self) -> str:
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        at = f"http://127.0.0.1:{self._port}"
        eventually(lambda: _is_ready(f"{at}/-/ready"), "Prometheus is ready")
        return at

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PROMPT_S):  # noqa: S310  of this machine
            return True
    except OSError:
        return False


def queries_of_the_dashboard() -> set[str]:
    dashboard = json.loads((ROOT / "clusters/metrics/dashboard.json").read_text())
    return {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}


def series() -> set[str]:
    """Return the names of all series, as queries have them."""
    ends = {Kind.HISTOGRAM: ("_bucket", "_count", "_sum")}
    return {f"{metric.name}{end}" for metric in METRICS for end in ends.get(metric.kind, ("",))}


class TestDocuments:
    def test_the_dashboard_uses_only_names_and_labels_that_there_are(self) -> None:
        labels = {label for metric in METRICS for label in metric.all_labels} | {"le"}
        for query in queries_of_the_dashboard():
            assert set(re.findall(r"tensorvine_\w+", query)) <= series(), query
            grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
            assert grouped | set(re.findall(r"(\w+)=", query)) <= labels, query

    def test_the_dashboard_has_what_operators_ask_for(self) -> None:
        text = " ".join(queries_of_the_dashboard())
        for stem in ("update_pause", "staleness", "lag", "superseded", "loaded_bytes", "fallbacks", "waiting_for"):
            assert stem in text
        for stem in ("lookups", "save_seconds", "load_seconds", "query_seconds", "push", "errors", "restarts"):
            assert stem in text

    def test_the_table_in_the_docs_has_each_metric(self) -> None:
        source = [(ROOT / "docs/reference/metrics.md").read_text()]
        names: dict[str, Any] = {}
        exec(compile((ROOT / "docs/conf.py").read_text(), "conf.py", "exec"), names)  # noqa: S102  ours
        names["insert_metrics"](None, "reference/metrics", source)
        rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \| (.*) \|$", source[0], re.MULTILINE)
        assert rows == [
            (m.name, str(m.kind), ", ".join(f"`{label}`" for label in m.all_labels), m.about) for m in METRICS
        ]
