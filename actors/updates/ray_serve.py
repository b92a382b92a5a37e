"""A Ray Serve deployment whose models are updated while they answer.

Rules
- A replica follows the repository by itself, so an update is no `reconfigure`: requests go on (ray#54509).
- `ray[serve]` is an extra; this file alone imports it, when an application is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..client.repository import Repository
from .consumer import ANSWERING
from .follower import ConsumerStatus, Follower
from .serving import Inference

if TYPE_CHECKING:
    from ray import serve
    from starlette.requests import Request

log = logging.getLogger(__name__)


class ModelReplica:
    """One replica: answers to calls of a deployment's handle and to HTTP requests."""

    def __init__(self, repository: str, name: str, build: Callable[[], object], transport: str) -> None:
        self._follower = Follower(Repository.connect(repository), name, build, transport)
        self._pool = ThreadPoolExecutor(ANSWERING, thread_name_prefix="tensorvine-answer")

    async def infer(self, batch: object, timeout: float = 30.0) -> Inference:
        """Answer with the newest version; errors as in `Consumer.infer`."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._follower.infer, batch, timeout)

    async def __call__(self, request: Request) -> dict[str, object]:
        """Answer an HTTP request with the JSON body {"batch": nested lists}: {"outputs", "version"}."""
        body: dict[str, Any] = await request.json()
        answer = await self.infer(np.asarray(body["batch"], np.float32))
        return {"outputs": np.asarray(answer.outputs).tolist(), "version": str(answer.ref)}

    async def status(self) -> ConsumerStatus:
        """Tell how this replica does."""
        return self._follower.status()

    def __del__(self) -> None:
        """Let go of the repository: Ray Serve calls this when it ends a replica."""
        if hasattr(self, "_follower"):
            self._follower.close()


def serve_application(
    repo: Repository, name: str, build: Callable[[], object], *, transport: str = "auto", **options: object
) -> serve.Application:
    """Make a Ray Serve application that answers with the newest version of a model.

    Args:
        repo: the repository.
        name: the model's name.
        build: makes a model, as in `Consumer.start`.
        transport: as in `Consumer.start`.
        options: of `serve.deployment`, such as `num_replicas=2` or `ray_actor_options={"num_gpus": 1}`.

    >>> handle = serve.run(serve_application(repo, "net", build, num_replicas=2))    # doctest: +SKIP
    >>> handle.infer.remote(batch).result().ref                                      # doctest: +SKIP
    """
    from ray import serve

    deployed = cast(Any, serve.deployment)(ModelReplica, **{"name": name.replace("/", "-"), **options})
    return deployed.bind(repo.name, name, build, transport)
