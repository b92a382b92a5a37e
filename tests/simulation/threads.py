"""Threads, locks, queues and pools of the standard library, as the scheduler of one world sees them.

Rules
- Every primitive belongs to the world in which it was made; taking a lock, and every wait, is a scheduling point.
- Names and behaviour are those of `threading`, `queue` and `concurrent.futures`, as far as TensorVine uses them.
- In a world that is over nothing waits and nothing is refused.
"""

from __future__ import annotations

import concurrent.futures
import queue
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import greenlet

from .scheduler import START_S, StuckError, World
from .scheduler import Thread as Greenlet

CLOCK_SET = 0.1
"""How often somebody sets the clock of the day before it is read."""
CLOCK_S = 3600.0
"""How far from the right time, at most, forward or back."""

_world: World | None = None
_T = TypeVar("_T")


def enter(world: World | None) -> None:
    """Have what is made from now on belong to a world."""
    global _world
    _world = world


def world() -> World:
    """Return the world in which the code under test runs."""
    if _world is None:
        raise StuckError("expected a world to be entered")
    return _world


class RLock:
    """A lock that its owner may take again."""

    reentrant = True

    def __init__(self) -> None:
        self._world = world()
        self._owner: Greenlet | None = None
        self._count = 0
        self._waiting: deque[Greenlet] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        w = self._world
        if w.over:
            return True
        me = w.current
        if self.reentrant and self._owner is me and self._count:
            self._count += 1
            return True
        if me is None:
            if self._count:
                raise StuckError("a lock is wanted by the scheduler itself")
            self._count = 1
            return True
        w.point()
        deadline = w.now + timeout if timeout >= 0 else None
        while self._count:
            if not blocking:
                return False
            self._waiting.append(me)
            try:
                in_time = w.block(deadline)
            except KeyboardInterrupt:
                self._give_up(me)
                raise
            if not in_time:
                if me in self._waiting:
                    self._waiting.remove(me)
                if self._count:
                    return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        if self._world.over:
            return
        self._count -= 1
        if self._count <= 0:
            self._free()

    def _give_up(self, thread: Greenlet) -> None:
        """Wait no more; if the lock is free, and this thread was to have it, let the next one have it."""
        if thread in self._waiting:
            self._waiting.remove(thread)
        elif not self._count:
            self._free()

    def _free(self) -> None:
        self._owner, self._count = None, 0
        while self._waiting:
            thread = self._waiting.popleft()
            if not thread.process.dead:
                self._world.wake(thread)
                break

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return self._count > 0


class Lock(RLock):
    """A lock."""

    reentrant = False


class Condition:
    """A condition variable."""

    def __init__(self, lock: RLock | None = None) -> None:
        self._world = world()
        self._lock = lock if lock is not None else RLock()
        self._waiting: deque[Greenlet] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        w = self._world
        me, count = w.current, self._lock._count
        if me is None:
            raise StuckError("a condition is awaited by the scheduler itself")
        self._waiting.append(me)
        self._lock._free()
        try:
            told = w.block(w.now + timeout if timeout is not None else None)
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            if not w.over:
                self._lock.acquire()
                self._lock._count = count
        return told

    def wait_for(self, predicate: Callable[[], _T], timeout: float | None = None) -> _T:
        end = self._world.now + timeout if timeout is not None else None
        result = predicate()
        while not result:
            left = end - self._world.now if end is not None else None
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        while n and self._waiting:
            self._world.wake(self._waiting.popleft())
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """An event."""

    def __init__(self) -> None:
        self._world = world()
        self._flag = False
        self._waiting: list[Greenlet] = []

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._world.wake(thread)

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        w = self._world
        if w.over:
            w.block()
        if self._flag:
            w.point()
            return True
        me = w.current
        if me is None:
            raise StuckError("an event is awaited by the scheduler itself")
        self._waiting.append(me)
        try:
            w.block(w.now + timeout if timeout is not None else None)
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
        return self._flag


class Semaphore:
    """A semaphore."""

    def __init__(self, value: int = 1) -> None:
        self._condition, self._value = Condition(), value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._condition:
            if not blocking and not self._value:
                return False
            if not self._condition.wait_for(lambda: self._value, timeout):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._condition:
            self._value += n
            self._condition.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """A thread of the process that starts it."""

    def __init__(
        self,
        target: Callable[..., Any] | None = None,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._world = world()
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self.name, self.daemon = name, daemon
        self._ended: Event | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        process = self._world.process
        if self._world.over or process is None:
            return
        ended = self._ended = Event()

        def life() -> None:
            try:
                self.run()
            finally:
                ended.set()

        self._world.spawn(process, self.name.removeprefix("tensorvine-"), life)

    def join(self, timeout: float | None = None) -> None:
        if self._ended is not None:
            self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._ended is not None and not self._ended.is_set()


class SimpleQueue:
    """A queue."""

    def __init__(self, *_: Any) -> None:
        self._condition = Condition()
        self._items: deque[Any] = deque()

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def put(self, item: Any) -> None:
        with self._condition:
            self._items.append(item)
            self._condition.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._condition:
            if not self._condition.wait_for(lambda: self._items, timeout if block else 0.0):
                raise queue.Empty
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Future(concurrent.futures.Future[Any]):
    """A future that simulated threads wait for."""

    def _await(self, timeout: float | None) -> None:
        if self.done():
            return
        w = world()
        me = w.current
        if w.over:
            raise greenlet.GreenletExit
        if me is None:
            raise StuckError("a future is awaited by the scheduler itself")
        waits = [me]
        self.add_done_callback(lambda _: w.wake(waits.pop()) if waits else None)
        try:
            in_time = w.block(w.now + timeout if timeout is not None else None)
        except KeyboardInterrupt:
            waits.clear()
            raise
        if not in_time:
            waits.clear()
            if not self.done():
                raise concurrent.futures.TimeoutError

    def result(self, timeout: float | None = None) -> Any:
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await(timeout)
        return super().exception(0)


class Executor(concurrent.futures.Executor):
    """A pool of threads of the process that made it."""

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "pool",
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self._world = world()
        self._process = self._world.process
        self._most = max_workers or 4
        self._name = thread_name_prefix.removeprefix("tensorvine-")
        self._initializer, self._initargs = initializer, initargs
        self._work: deque[tuple[Future, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = deque()
        self._idle: list[Greenlet] = []
        self._count = 0
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:  # type: ignore[override]
        future = Future()
        if self._world.over or self._closed:
            future.cancel()
            return future
        self._work.append((future, fn, args, kwargs))
        if self._idle:
            self._world.wake(self._idle.pop())
        elif self._count < self._most and self._process is not None:
            self._count += 1
            self._world.spawn(self._process, f"{self._name}-{self._count}", self._serve)
        return future

    def _serve(self) -> None:
        if self._initializer is not None:
            self._initializer(*self._initargs)
        w = self._world
        while not self._closed or self._work:
            while self._work:
                future, fn, args, kwargs = self._work.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                w.point()
                try:
                    result = fn(*args, **kwargs)
                except Exception as exc:  # noqa: BLE001  it is the waiter's
                    if not w.over:
                        future.set_exception(exc)
                else:
                    if not w.over:
                        future.set_result(result)
                    del result
                del future, fn, args, kwargs
            if self._closed:
                return
            me = w.current
            if me is not None:
                self._idle.append(me)
            w.block()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        idle, self._idle = self._idle, []
        for thread in idle:
            self._world.wake(thread)


def wait(fs: Iterable[Any], timeout: float | None = None, return_when: str = "ALL_COMPLETED") -> Any:
    """Wait for futures."""
    w = world()
    futures = list(fs)
    deadline = w.now + timeout if timeout is not None else None
    for future in futures:
        if isinstance(future, Future):
            try:
                future.exception(deadline - w.now if deadline is not None else None)
            except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                continue
    done = {future for future in futures if future.done()}
    return _Waited(done, set(futures) - done)


class _Waited(NamedTuple):
    done: set[Any]
    not_done: set[Any]


class Clock:
    """`time`, virtual."""

    def __getattr__(self, name: str) -> Any:
        import time

        return getattr(time, name)

    @staticmethod
    def monotonic() -> float:
        return world().now

    perf_counter = monotonic

    @staticmethod
    def monotonic_ns() -> int:
        return int(world().now * 1e9)

    @staticmethod
    def time() -> float:
        """Return the time of the day, which somebody sets forward and back: nothing may follow from it."""
        w = world()
        if w.clock.random() < CLOCK_SET:
            w.clock_s = w.clock.uniform(-CLOCK_S, CLOCK_S)
        return 1.7e9 + w.now - START_S + w.clock_s

    @classmethod
    def time_ns(cls) -> int:
        return int(cls.time() * 1e9)

    @staticmethod
    def sleep(seconds: float) -> None:
        world().sleep(seconds)


class Threading:
    """`threading`, as far as it is used."""

    Lock = Lock
    RLock = RLock
    Condition = Condition
    Event = Event
    Semaphore = Semaphore
    Thread = Thread

    def __getattr__(self, name: str) -> Any:
        import threading

        return getattr(threading, name)

    @staticmethod
    def get_native_id() -> int:
        return 1
