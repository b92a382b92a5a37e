"""The JSON twins of the pages, events and changes, against a real repository."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import psutil
import pytest
from starlette.testclient import TestClient
from tensorvine.actors import Consumer, Publisher, Repository
from tensorvine.actors.engine.engine import Engine
from tensorvine.clusters.web import openapi
from tensorvine.clusters.web.access import Access
from tensorvine.clusters.web.app import Web
from tensorvine.clusters.web.source import Source
from tensorvine.store import Layer, ModelGraph

from tests.support.disk import kill_shard
from tests.support.waiting import eventually
from tests.support.web import BEARER, TOKEN, served, web_of

HTML = "<img src=x onerror=alert(1)>"


def graph(units: int) -> ModelGraph:
    return ModelGraph(
        [
            Layer("in", {"class": "Input"}),
            Layer("stem", {"class": "Dense", "note": HTML}, ("in",), ("stem/w",)),
            Layer("head", {"class": "Dense", "units": units}, ("stem",), ("head/w", "head/b")),
        ]
    )


def tensors(units: int, start: float = 0.0) -> dict[str, np.ndarray]:
    head = np.arange(start, start + 4 * units, dtype=np.float32).reshape(4, units)
    return {"stem/w": np.ones((4, 4), np.float32), "head/w": head, "head/b": np.zeros(units)}


@pytest.fixture(scope="module")
def repo(cluster: Engine) -> Iterator[Repository]:
    """One repository for all tests here that change nothing."""
    with Repository.start("web-app", shards=2, preallocate_bytes=0) as started:
        started.save("net", tensors(2), graph=graph(2), quality=0.5, metadata={"html": HTML, "long": "x" * 30_000})
        started.save("net", tensors(2, 1.0), graph=graph(2), quality=float("nan"))
        started.save("other/net-1", tensors(3), graph=graph(3), parent="net@1", quality=float("inf"))
        for n in range(6):
            started.save(f"leaf-{n}", {"t": np.full(3, n)}, parent="net@2")
        yield started


@contextmanager
def client_of(web: Web) -> Iterator[TestClient]:
    with TestClient(web.application(), headers=BEARER) as client:
        yield client


@pytest.fixture(scope="module")
def client(repo: Repository) -> Iterator[TestClient]:
    with client_of(web_of(repo)) as made:
        yield made


def fits(value: object, shape: object, where: str) -> list[str]:
    """List where an answer is not as it is described."""
    if isinstance(shape, str):
        if value is None:
            return [] if shape.endswith("?") else [f"{where}: null"]
        kinds = {"text": str, "integer": int | str, "number": int | float | str, "boolean": bool, "map": dict}
        return [] if isinstance(value, kinds[shape.rstrip("?")]) else [f"{where}: {value!r:.80} is no {shape}"]
    if isinstance(shape, list):
        assert isinstance(value, list), where
        return [wrong for n, one in enumerate(value) for wrong in fits(one, shape[0], f"{where}[{n}]")]
    assert isinstance(shape, dict)
    assert isinstance(value, dict), where
    return [wrong for key, inner in shape.items() for wrong in fits(value.get(key), inner, f"{where}.{key}")]


class TestTwins:
    @pytest.mark.parametrize(
        ("path", "query"),
        [
            ("/api/now", ""),
            ("/api/compare", "a=net@1&b=other/net-1"),
            ("/api/version", "ref=net@1"),
            ("/api/versions", "q=net"),
            ("/api/lineage", "ref=net"),
            ("/api/changes", "ref=net@1"),
        ],
    )
    def test_each_is_as_the_document_says(self, client: TestClient, path: str, query: str) -> None:
        (described,) = [one for one in openapi.OPERATIONS if one.path == path]
        answer = client.get(f"{path}?{query}")
        assert answer.status_code == 200, answer.text
        assert fits(answer.json(), described.answer, path) == []

    def test_the_document_lists_them(self, client: TestClient) -> None:
        document = client.get("/api/openapi.json").json()
        assert document["openapi"].startswith("3.1")
        assert set(document["paths"]) == {one.path for one in openapi.OPERATIONS}
        for path in ("/", "/compare", "/version", "/lineage", "/changes"):
            assert client.get(path).status_code == 200

    def test_now_has_shards_nodes_and_the_newest_versions(self, client: TestClient) -> None:
        now = client.get("/api/now").json()
        assert (now["state"], now["repository"], now["missing"]) == ("ok", "web-app", {})
        assert [shard["answers"] for shard in now["shards"]] == [True, True]
        assert [node["shards"] for node in now["nodes"]] == [[0, 1]]
        assert now["totals"]["models"] == 9
        assert now["newest"][0]["ref"] == "leaf-5@1"

    def test_metrics_stand_beside_the_page_and_take_the_token_too(self, client: TestClient) -> None:
        found = client.get("/metrics")
        assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'tensorvine_up{actor="planner"} 1.0' in found.text
        assert client.get("/metrics", headers={"authorization": "Bearer wrong"}).status_code == 401

    def test_two_versions_are_compared(self, client: TestClient) -> None:
        told = client.get("/api/compare?a=net@1&b=net@2").json()
        assert told["summary"]["tensors"] == {"equal": 2, "changed": 1, "new": 0, "gone": 0}
        head = next(row for row in told["layers"] if row["b"] == "head")
        changed = next(tensor for tensor in head["tensors"] if tensor["b"] == "head/w")
        assert (changed["state"], changed["norm"], changed["changed"]) == ("changed", pytest.approx(8**0.5), 8)
        assert (changed["owner_a"], changed["owner_b"]) == ("net@1", "net@2")
        assert sum(changed["histogram"]) == 8
        wider = client.get("/api/compare?a=net@1&b=other/net-1").json()
        assert [row["match"] for row in wider["layers"]] == ["prefix", "prefix", "name"]
        assert wider["layers"][2]["config"] == [{"key": "units", "a": 2, "b": 3}]
        bare = client.get("/api/compare?a=net@1&b=leaf-0@1").json()
        assert bare["summary"]["tensors"] == {"equal": 0, "changed": 0, "new": 1, "gone": 3}

    def test_a_version_says_who_wrote_what_and_what_it_shares(self, client: TestClient) -> None:
        told = client.get("/api/version?ref=net@2").json()
        assert told["quality"] == "NaN"
        assert told["owners"] == {"net@1": 2, "net@2": 1}
        assert [(one["ref"], one["tensors"]) for one in told["ancestors"]] == [("net@1", 2)]
        assert {one["ref"] for one in told["descendants"]} == {f"leaf-{n}@1" for n in range(6)}
        assert told["latest"] is True
        first = client.get("/api/version?ref=net@1").json()
        assert first["metadata"]["long"] == "x" * 30_000
        brief = client.get("/api/version?ref=net@1&brief=1").json()
        assert brief["metadata"] is None
        assert len(brief["metadata_text"]) < 30_000 < brief["metadata_chars"]

    def test_lineage_is_folded_and_searched(self, client: TestClient) -> None:
        nodes = client.get("/api/lineage").json()["nodes"]
        assert [(node["kind"], node["first"], node["count"]) for node in nodes] == [
            ("version", "net@1", 1),
            ("version", "net@2", 1),
            ("version", "other/net-1@1", 1),
            ("fold", "leaf-0@1", 6),
        ]
        opened = client.get("/api/lineage", params={"open": nodes[-1]["id"]}).json()["nodes"]
        assert len(opened) == 9
        found = client.get("/api/versions?q=LEAF&limit=2").json()
        assert (found["count"], [one["ref"] for one in found["versions"]]) == (6, ["leaf-5@1", "leaf-4@1"])
        below = client.get("/api/versions?parent=net@1").json()["versions"]
        assert {one["ref"] for one in below} == {"net@2", "other/net-1@1"}

    @pytest.mark.parametrize(
        ("path", "status"),
        [
            ("/api/version?ref=none@1", 404),
            ("/api/version?ref=net@99", 404),
            ("/api/version?ref=../etc", 400),
            ("/api/version", 400),
            ("/api/compare?a=net@1&b=%00", 400),
            ("/api/compare?a=net@1", 400),
            ("/api/versions?limit=-1", 400),
            ("/api/versions?limit=9999999999999999999", 400),
            ("/api/lineage?ref=net@0", 400),
            ("/api/none", 404),
            ("/static/../app.py", 404),
            ("/static/%2e%2e/app.py", 404),
        ],
    )
    def test_bad_input_is_an_error_with_a_status(self, client: TestClient, path: str, status: int) -> None:
        answer = client.get(path)
        assert answer.status_code == status
        assert status != 400 or "error" in answer.json()


class TestChanges:
    def test_they_are_refused_unless_they_are_allowed(self, client: TestClient, repo: Repository) -> None:
        for path, body in (("retire", {"ref": "net@2", "confirm": "net@2"}), ("scale", {"shards": 1})):
            answer = client.post(f"/api/{path}", json=body)
            assert answer.status_code == 403
            assert "--allow-changes" in answer.json()["error"]
        assert repo.info("net").ref.version == 2
        assert client.get("/api/changes").json()["allowed"] is False
        assert client.get("/api/retire").status_code == 405

    def test_a_version_is_retired_after_a_confirmation_that_names_it(self, repository: Repository) -> None:
        for _ in range(2):
            repository.save("m", {"w": np.zeros(4)})
        with client_of(web_of(repository, allow_changes=True)) as client:
            going = client.get("/api/changes?ref=m@2").json()["retire"]
            assert (going["confirm"], going["descendants"], going["tensors_owned"]) == ("m@2", 0, 0)
            for body in ({"ref": "m@2"}, {"ref": "m@2", "confirm": "m"}, {"ref": "m", "confirm": "m"}, [], "x"):
                assert client.post("/api/retire", json=body).status_code == 400
            assert client.post("/api/retire", content=b"{", headers={"Content-Type": "text/plain"}).status_code == 415
            json_type = {"Content-Type": "application/json"}
            assert client.post("/api/retire", content=b"[" * 60_000, headers=json_type).status_code == 400
            assert client.post("/api/retire", content=b"1" * 70_000, headers=json_type).status_code == 413
            done = client.post("/api/retire", json={"ref": "m@2", "confirm": "m@2"})
            assert (done.status_code, done.json()) == (200, {"retired": "m@2"})
            assert client.post("/api/retire", json={"ref": "m@2", "confirm": "m@2"}).status_code == 404
        assert [str(ref) for ref in repository.models()] == ["m@1"]

    def test_another_site_cannot_change_anything(self, repository: Repository) -> None:
        repository.save("m", {"w": np.zeros(4)})
        with TestClient(web_of(repository, allow_changes=True).application()) as client:
            token = BEARER["Authorization"].partition(" ")[2]
            assert client.get(f"/?token={token}").status_code == 200
            body = {"ref": "m@1", "confirm": "m@1"}
            for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
                assert client.post("/api/retire", json=body, headers=headers).status_code == 403
            assert [str(ref) for ref in repository.models()] == ["m@1"]
            same = {"Origin": "http://testserver"}
            assert client.post("/api/retire", json=body, headers=same).status_code == 200

    def test_the_number_of_shards_is_changed(self, repository: Repository) -> None:
        with client_of(web_of(repository, allow_changes=True)) as client:
            for count in (0, -1, True, "2", 1.5, None, 10**9):
                assert client.post("/api/scale", json={"shards": count, "confirm": ""}).status_code == 400
            assert client.post("/api/scale", json={"shards": 2, "confirm": "scale from 9 to 2"}).status_code == 400
            done = client.post("/api/scale", json={"shards": 2, "confirm": "scale from 1 to 2"})
            assert (done.status_code, done.json()["shards_after"]) == (200, 2)
            shards = eventually(lambda: client.get("/api/now").json().get("shards", []), "shards are shown")
            assert [shard["shard"] for shard in shards] == list(repository.shards)


class TestTrainingsAndConsumers:
    def test_a_training_run_and_a_consumer_are_shown(self, repository: Repository) -> None:
        class Model:
            def assign(self, tensors: Any) -> None:
                self.tensors = dict(tensors)

            def __call__(self, batch: object) -> object:
                return batch

        with (
            Publisher(repository, "on/line", schedule=10) as publisher,
            Consumer.start(repository, "on/line", Model) as consumer,
            client_of(web_of(repository)) as client,
        ):
            for step in range(1, 41):
                publisher.step(1.0 / step, {"w": np.full(8, step, np.float32)})
            consumer.wait_for(1)
            consumer.infer([1])

            def shown() -> dict[str, Any] | None:
                now = client.get("/api/now").json()
                found = [c for c in now.get("consumers", []) if c.get("ref") and c["answered"]]
                return (
                    now if found and [t for t in now["trainings"] if t["iteration"] == 40 and t["published"]] else None
                )

            now = eventually(shown, "the consumer and the training run")
            (run,), (served_by,) = now["trainings"], now["consumers"]
            assert (run["model"], run["losses"][-1], run["published"][0]) == ("on/line", [40, 1.0 / 40], 10)
            assert (served_by["model"], served_by["trouble"], served_by["refusals"]) == ("on/line", "", 0)
            assert served_by["lag_versions"] == len([r for r in repository.models() if str(r) > served_by["ref"]])
            assert now["traffic"][0]["deliveries"] >= 1
            told = client.get("/api/version", params={"ref": served_by["ref"]}).json()
            assert [one["consumer"] for one in told["consumers"]] == [served_by["consumer"]]
            assert told["training"]["model"] == "on/line"


class Viewer:
    """Reads events; `opened` is the connection."""

    def __init__(self, url: str) -> None:
        self.opened = urlopen(Request(f"{url}/api/events", headers=BEARER), timeout=60)  # noqa: S310

    def now(self) -> dict[str, Any]:
        """Return the next snapshot."""
        while True:
            line = self.opened.readline()
            assert line, "the server ended the stream"
            if line.startswith(b"data:"):
                return json.loads(line[5:])

    def until(self, condition: Any, what: str) -> dict[str, Any]:
        return eventually(lambda: (now := self.now()) and condition(now) and now, what, pause=0.0)


class TestEvents:
    def test_two_viewers_see_a_new_version_and_a_slow_one_holds_up_nobody(self, repository: Repository) -> None:
        with served(repository) as page, socket.create_connection(("127.0.0.1", page.port)) as slow:
            request = f"GET /api/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: {BEARER['Authorization']}\r\n\r\n"
            slow.sendall(request.encode())  # and it never reads
            viewers = [Viewer(page.url), Viewer(page.url)]
            repository.save("fresh", {"w": np.zeros(4)})
            for viewer in viewers:
                viewer.until(lambda now: now["newest"] and now["newest"][0]["ref"] == "fresh@1", "the version is shown")
            repository.retire("fresh@1")
            for viewer in viewers:
                viewer.until(lambda now: not now["newest"], "it is gone")
                viewer.opened.close()

    def test_an_idle_connection_is_closed(self, repository: Repository) -> None:
        source = Source(repository.engine, repository.name)
        source.ask(lambda repo: repo.models())
        source.rest()
        assert source.is_connected
        source.rest(idle_s=0.0)
        assert not source.is_connected

    def test_a_shard_that_does_not_answer_is_shown_and_so_is_its_end(self, repository: Repository) -> None:
        repository.save("m", {"w": np.zeros(4)})
        with served(repository) as page, stopped_shard(repository) as shard:
            viewer = Viewer(page.url)
            silent = viewer.until(lambda now: now["state"] == "ok" and not now["shards"][0]["answers"], "it is silent")
            assert silent["shards"][0]["trouble"]
            shard.resume()
            viewer.until(lambda now: now["state"] == "ok" and now["totals"]["models"] == 1, "it answers again")
            kill_shard(repository, 0)
            viewer.until(lambda now: now["state"] == "ok" and now["totals"]["models"] == 0, "it started again")
            viewer.opened.close()


@contextmanager
def stopped_shard(repository: Repository) -> Iterator[psutil.Process]:
    """Stop the process of shard 0 for a while."""
    process = psutil.Process(repository._session.connection(0).hello.pid)
    process.suspend()
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


class TestARepositoryThatIsNotThere:
    def test_without_one_pages_say_so_and_a_later_one_is_shown(self, cluster: Engine) -> None:
        web = Web(Source(cluster, "web-later"), Access.of(TOKEN, ["testserver"], 80))
        with client_of(web) as client:
            now = client.get("/api/now").json()
            assert (now["state"], "web-later" in now["trouble"]) == ("away", True)
            assert client.get("/api/lineage").status_code == 503
            assert client.get("/").status_code == 200
            for round_ in range(2):  # stopped, and started again, under it
                with Repository.start("web-later", shards=1, preallocate_bytes=0) as repo:
                    repo.save(f"round-{round_}", {"w": np.zeros(2)})
                    shown = eventually(lambda: _newest(client), "the repository is shown")
                    assert shown == [f"round-{round_}@1"]
                    assert client.get(f"/api/version?ref=round-{round_}@1").status_code == 200
                eventually(lambda: client.get("/api/now").json()["state"] == "away", "it is gone")


def _newest(client: TestClient) -> list[str]:
    return [one["ref"] for one in client.get("/api/now").json().get("newest", [])]


def test_all_versions_are_listed_at_once(repo: Repository) -> None:
    infos = repo.infos()
    assert [info.ref for info in infos] == repo.models()
    assert [(info.parent, info.bytes_owned) for info in infos] == [
        (one.parent, one.bytes_owned) for one in map(repo.info, repo.models())
    ]
    assert {len(info.metadata) for info in infos} == {0}
    third = sorted(info.created for info in infos)[2]
    assert len(repo.infos(after=third)) == len(infos) - 3
    assert [info.ref.name for info in repo.infos("leaf-")] == [f"leaf-{n}" for n in range(6)]
