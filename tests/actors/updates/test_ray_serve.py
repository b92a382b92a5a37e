"""The Ray Serve deployment: requests go on while versions come."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
import ray
from tensorvine.actors import Repository
from tensorvine.clusters.head import free_port
from tensorvine.store.errors import VersionNotServedError

serve = pytest.importorskip("ray.serve")
from tensorvine.actors.updates.ray_serve import batch_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Serve's own
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Scale:
    """Multiplies by all of its tensors, which are equal in a whole version."""

    def assign(self, given: dict[str, np.ndarray]) -> None:
        self.tensors = given

    def __call__(self, batch: Any) -> Any:
        (by,) = {float(value) for array in self.tensors.values() for value in array}
        return np.asarray(batch) * by


def version(value: float) -> dict[str, np.ndarray]:
    return {f"t{i}": np.full(1000, value, np.float32) for i in range(8)}


@pytest.fixture(scope="module")
def repo(cluster: object) -> Iterator[Repository]:
    with Repository.start("served", shards=1, preallocate_bytes=0) as repository:
        yield repository
        serve.shutdown()


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"batch": [[1, 2], [3, 4]]}, np.int64([[1, 2], [3, 4]])),
        ({"batch": [[1, 2.5]]}, np.float32([[1, 2.5]])),
        ({"batch": [True, False]}, np.array([True, False])),
        ({"batch": [1, 2], "dtype": "float16"}, np.float16([1, 2])),
    ],
)
def test_integers_of_a_request_stay_integers_and_a_dtype_may_be_stated(body: Any, wanted: Any) -> None:
    found = batch_of(body)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "body", [3, {}, {"batch": [[1], [2, 3]]}, {"batch": [1], "dtype": "many"}, {"batch": {"a": [[1], [2, 3]]}}]
)
def test_a_request_that_makes_no_batch_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match=r"^request: expected"):
        batch_of(body)


@pytest.mark.timeout(180)
def test_requests_are_answered_while_versions_come(repo: Repository) -> None:
    from tensorvine.actors import serve_application

    repo.save("scale", version(1))
    port = free_port()
    serve.start(http_options={"port": port})
    handle = serve.run(serve_application(repo, "scale", Scale, ray_actor_options={"num_cpus": 0.1}))
    answers: list[Any] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(handle.infer.remote(np.float32([1.0])).result(timeout_s=30))

    thread = threading.Thread(target=ask)
    thread.start()
    for value in range(2, 31):
        repo.save("scale", version(value))
    deadline = threading.Event()
    for _ in range(600):
        if answers and answers[-1].ref.version == 30:
            break
        deadline.wait(0.05)
    stop.set()
    thread.join(30)
    assert answers[-1].ref.version == 30
    assert all(float(answer.outputs[0]) == answer.ref.version for answer in answers)
    assert handle.status.remote().result(timeout_s=30).ref == answers[-1].ref
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/", data=json.dumps({"batch": [2.0, 3.0]}).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
        assert json.load(response) == {"outputs": [60.0, 90.0], "version": "scale@30", "first": "scale@30"}
    with pytest.raises(VersionNotServedError, match="found scale@30"):
        handle.infer.remote(np.float32([1.0]), exactly=29).result(timeout_s=30)
    request.data = json.dumps({"batch": [2.0], "at_least": 31}).encode()
    with pytest.raises(HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)  # noqa: S310
    assert caught.value.code == 409
    assert json.load(caught.value)["version"] == "scale@30"
