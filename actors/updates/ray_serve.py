"""A Ray Serve deployment whose models are updated while they answer.

Rules
- A replica follows the repository by itself, so an update is no `reconfigure`: requests go on (ray#54509).
- Ray Serve comes with the extra `ray`; this file alone imports it, when an application is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...store.errors import VersionNotServedError
from ..client.repository import Repository
from .consumer import ANSWERING
from .follower import ConsumerStatus, Follower
from .rollout import Waves
from .serving import Generate, Inference

if TYPE_CHECKING:
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import JSONResponse

log = logging.getLogger(__name__)


class ModelReplica:
    """One replica: answers to calls of a deployment's handle and to HTTP requests."""

    def __init__(
        self,
        repository: str,
        name: str,
        build: Callable[[], object],
        transport: str,
        generate: Generate | None,
        rollout: Waves | None,
    ) -> None:
        self._follower = Follower(Repository.connect(repository), name, build, transport, generate, rollout)
        self._pool = ThreadPoolExecutor(ANSWERING, thread_name_prefix="tensorvine-answer")

    async def infer(
        self, batch: object, timeout: float = 30.0, *, at_least: int | None = None, exactly: int | None = None
    ) -> Inference:
        """Answer with the newest version; errors as in `Consumer.infer`."""
        infer = partial(self._follower.infer, batch, timeout, at_least=at_least, exactly=exactly)
        return await asyncio.get_running_loop().run_in_executor(self._pool, infer)

    async def __call__(self, request: Request) -> dict[str, object] | JSONResponse:
        """Answer an HTTP request; see `serve_application`."""
        body = await request.json()
        batch = batch_of(body)
        try:
            answer = await self.infer(batch, at_least=body.get("at_least"), exactly=body.get("exactly"))
        except VersionNotServedError as exc:
            from starlette.responses import JSONResponse

            return JSONResponse({"error": str(exc), "version": exc.served}, status_code=409)
        return {"outputs": _plain(answer.outputs), "version": str(answer.ref), "first": str(answer.first)}

    async def status(self) -> ConsumerStatus:
        """Tell how this replica does."""
        return self._follower.status()

    def __del__(self) -> None:
        """Let go of the repository: Ray Serve calls this when it ends a replica."""
        if hasattr(self, "_follower"):
            self._follower.close()


def batch_of(body: object) -> object:
    """Return the batch of a request's JSON body.

    Args:
        body: {"batch": nested lists, or an object of such by name; "dtype": the dtype of their arrays, or an object of
            dtypes by name}. Without a dtype integers are int64, other numbers float32.

    Raises:
        ValueError: the body has no batch, lists are ragged, or a dtype is none.

    >>> batch_of({"batch": {"ids": [[1, 2]], "mask": [[1.0, 0.5]]}, "dtype": {"ids": "int32"}})
    {'ids': array([[1, 2]], dtype=int32), 'mask': array([[1. , 0.5]], dtype=float32)}
    """
    if not isinstance(body, dict) or "batch" not in body:
        raise ValueError('request: expected a JSON object with "batch"; found none')
    given = cast("dict[str, Any]", body)
    return _arrays(given["batch"], given.get("dtype"))


def _arrays(batch: Any, dtype: Any) -> object:
    if isinstance(batch, dict):
        dtypes = cast("dict[str, Any]", dtype) if isinstance(dtype, dict) else {}
        parts = cast("dict[str, Any]", batch).items()
        return {name: _arrays(part, dtypes.get(name) if isinstance(dtype, dict) else dtype) for name, part in parts}
    try:
        array = np.asarray(batch, dtype)
    except (TypeError, ValueError) as exc:
        raise ValueError(
            f"request: expected a batch of nested lists of one shape, and a dtype of NumPy; {exc}"
        ) from exc
    return array.astype(np.float32) if dtype is None and array.dtype == np.float64 else array


def _plain(outputs: object) -> object:
    """Return outputs as JSON has them."""
    if isinstance(outputs, dict):
        return {str(name): _plain(part) for name, part in cast("dict[object, object]", outputs).items()}
    if isinstance(outputs, (list, tuple)):
        return [_plain(part) for part in cast("list[object]", outputs)]
    return np.asarray(outputs).tolist()


def serve_application(
    repo: Repository,
    name: str,
    build: Callable[[], object],
    *,
    transport: str = "auto",
    generate: Generate | None = None,
    rollout: Waves | None = None,
    **options: object,
) -> serve.Application:
    """Return a Ray Serve application that answers requests with the newest version of a model.

    The handle of the application has the method `infer`, with the arguments and the result of `Consumer.infer`. Over
    HTTP, the application accepts JSON, `{"batch": ..., "dtype": ...}`, and returns
    `{"outputs": ..., "version": "name@3", "first": "name@3"}`. The request may also contain "at_least" or "exactly". A
    replica that uses another version answers with status 409 and `{"error": ..., "version": "name@2"}`.
    The batch is a nested list, or a JSON object that maps input names to nested lists. By default, integers become
    int64 and floating-point numbers become float32. The optional "dtype" is a NumPy dtype for all inputs, or a JSON
    object that maps input names to dtypes.

    Replicas load new versions while they answer requests. No redeployment is needed.

    Args:
        repo: The repository.
        name: Name of the model, or `name@alias`, as in `Consumer.start`.
        build: Function that builds a model, as in `Consumer.start`.
        transport: Transport by which versions are fetched, as in `Consumer.start`.
        generate: Function that computes the outputs by several calls of the model, as in `Consumer.start`.
        rollout: Limit of replicas that load a version at the same time, as in `Consumer.start`.
        options: Options of `serve.deployment`, such as `num_replicas=2` or `ray_actor_options={"num_gpus": 1}`.

    Returns:
        The application, to be passed to `serve.run`.

    >>> handle = serve.run(serve_application(repo, "net", build, num_replicas=2))    # doctest: +SKIP
    >>> handle.infer.remote(batch).result().ref                                      # doctest: +SKIP
    """
    from ray import serve

    named = {"name": name.replace("/", "-").replace("@", "-")}
    deployed = cast(Any, serve.deployment)(ModelReplica, **named | options)
    return deployed.bind(repo.name, name, build, transport, generate, rollout)
