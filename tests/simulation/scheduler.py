"""One scheduler, one clock: processes and threads of a whole repository as greenlets that take turns.

Rules
- Exactly one simulated thread runs at a time, until it calls something here: `point`, `block`, or a primitive of
  `threads` that does. Which one runs next, and what is delayed, is drawn from one seeded generator.
- Time is virtual. Computing takes none; it passes only when no thread can run, or where a thread is stalled.
- A killed process is never resumed and runs no `finally`; what it kept alive stays so until the world ends.
- When a world ends every primitive gives way at once, so that what still runs comes to its end without effect.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import greenlet

START_S = 1_000_000.0
"""The virtual clock's first reading: far enough from 0 that nothing is "never"."""
STEPS_MOST = 60_000
"""A world that takes more steps than this has a loop that no time passes in."""


class StuckError(Exception):
    """A world that makes no progress."""


class Process:
    """A simulated process: threads, descriptors and a node; gone when it was killed."""

    def __init__(self, world: World, name: str, node: str) -> None:
        self.world = world
        self.name = name
        self.node = node
        self.pid = world.number()
        self.dead = False
        self.stopped_until = 0.0
        self.held: list[Thread] = []
        """Threads that could run if the process were not stopped."""
        self.descriptors: dict[int, Any] = {}
        self.facts: dict[str, Any] = {}
        """What the seams keep for a process, such as its disk trouble."""
        world.processes[self.pid] = self

    def __repr__(self) -> str:
        return f"{self.name}#{self.pid}"


class Interrupt(Protocol):
    """A signal on its way to one thread, whose handler raises (see `interrupts`)."""

    def leaves(self) -> None:
        """Note that the thread stops running for a while."""

    def returns(self) -> None:
        """Note that it runs again."""

    def waits(self) -> None:
        """Note that the thread begins a wait that a signal ends; may raise."""

    def waited(self) -> None:
        """Note that it ended; raises if the signal ended it."""


class Thread:
    """A simulated thread."""

    __slots__ = ("ended", "greenlet", "interrupt", "loop", "name", "parked", "process", "timed_out", "token")

    def __init__(self, process: Process, name: str, run: Callable[[], None]) -> None:
        self.process = process
        self.name = name
        self.loop: asyncio.AbstractEventLoop | None = None
        self.interrupt: Interrupt | None = None
        """A signal that this thread is going to get."""
        self.greenlet = greenlet.greenlet(run, process.world.hub)
        self.parked = False
        self.timed_out = False
        self.ended = False
        self.token = 0

    def __repr__(self) -> str:
        return f"{self.process}/{self.name}"


class World:
    """All that one seed makes happen.

    Args:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.hub = greenlet.getcurrent()
        self.random = random.Random(seed)  # noqa: S311  no secrets
        self.clock = random.Random(f"clock {seed}")  # noqa: S311  of its own: what is set must not change the world
        self.clock_s = 0.0
        """How far the clock of the day is from the right time."""
        self.now = START_S
        self.steps = 0
        self.over = False
        self.processes: dict[int, Process] = {}
        self.current: Thread | None = None
        self.trace: list[str] | None = None
        self.stall_chance = 0.01
        self.copy_chance = 0.05
        self.switch_chance = 0.3
        self.stalls_s: tuple[float, ...] = (0.0001, 0.001, 0.01, 0.05)
        self.errors: list[str] = []
        """What the simulation itself did wrong."""
        self._draw = self.random.random
        self._numbers = 1000
        self._threads: list[Thread] = []
        self._runnable: list[Thread] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._alarm: tuple[int, Thread] | None = None
        self._done = False

    # ---- numbers and words ------------------------------------------------------------------------------

    def number(self) -> int:
        """Return a number that was never given before: a process, a descriptor."""
        self._numbers += 1
        return self._numbers

    def note(self, what: str) -> None:
        """Write a line of the trace."""
        if self.trace is not None:
            who = self.current if self.current is not None else "-"
            self.trace.append(f"{self.now - START_S:10.4f} {self.steps:6d} {who}: {what}")

    @property
    def process(self) -> Process | None:
        """The process that runs now."""
        return self.current.process if self.current is not None else None

    # ---- what runs --------------------------------------------------------------------------------------

    def spawn(self, process: Process, name: str, target: Callable[[], Any]) -> Thread:
        """Start a thread."""
        thread = Thread(process, name, lambda: self._life(thread, target))
        self._threads.append(thread)
        self._runnable.append(thread)
        return thread

    def _life(self, thread: Thread, target: Callable[[], Any]) -> None:
        try:
            target()
        except greenlet.GreenletExit:
            pass
        except Exception as exc:  # noqa: BLE001  a thread that ends by an error is the simulation's news
            if not self.over and not thread.process.dead:
                self.thread_died(thread, exc)
        finally:
            thread.ended = True

    def thread_died(self, thread: Thread, error: Exception) -> None:
        """Hear that a thread of the code under test ended by an error; whoever runs the world may replace it."""
        self.errors.append(f"{thread}: {type(error).__name__}: {error}")

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen at a time."""
        self._serial += 1
        heapq.heappush(self._timers, (when, self._serial, what))

    def point(self) -> None:
        """Let others run here, perhaps, or be delayed."""
        thread = self.current
        if thread is None or self.over:
            return
        drawn = self._draw()
        if drawn < self.stall_chance:
            self.block(self.now + self.random.choice(self.stalls_s) * self._draw(), signals=False)
        elif drawn < self.switch_chance:
            self._runnable.append(thread)
            self._leave(thread)

    def copying(self) -> None:
        """Let others run here more often: bytes are about to be copied, which takes time."""
        if self.current is not None and not self.over and self._draw() < self.copy_chance:
            self.block(self.now + self.random.choice(self.stalls_s) * self._draw(), signals=False)
        else:
            self.point()

    def switch(self) -> None:
        """Let others run first."""
        thread = self.current
        if thread is not None and not self.over:
            self._runnable.append(thread)
            self._leave(thread)

    def block(self, deadline: float | None = None, *, signals: bool = True) -> bool:
        """Park the running thread until `wake`, or the deadline: then False.

        Args:
            deadline: until when; None: for ever.
            signals: a signal ends this wait, as it ends that for a lock; it does not end what only takes long.

        Raises:
            KeyboardInterrupt: a signal did.
        """
        if self.over:
            raise greenlet.GreenletExit
        thread = self.current
        if thread is None:
            raise StuckError("expected a thread to wait; found the scheduler itself")
        interrupt = thread.interrupt if signals else None
        if interrupt is not None:
            interrupt.waits()
        thread.token += 1
        thread.parked, thread.timed_out = True, False
        if deadline is not None:
            token = thread.token
            self.at(max(deadline, self.now), lambda: self._expire(thread, token))
        self._leave(thread)
        if interrupt is not None:
            interrupt.waited()
        return not thread.timed_out

    def sleep(self, seconds: float) -> None:
        """Let time pass for the running thread."""
        end = self.now + seconds
        while self.now < end:
            self.block(end)

    def await_step(self, steps: int, seconds: float) -> None:
        """Let others run so many steps, however little time they take, or so long a time. One thread at a time may."""
        thread = self.current
        if thread is not None:
            self._alarm = (self.steps + steps, thread)
            self.block(self.now + seconds)
            self._alarm = None

    def wake(self, thread: Thread) -> None:
        """Let a parked thread run again."""
        if thread.parked:
            thread.parked = False
            self._runnable.append(thread)

    def _expire(self, thread: Thread, token: int) -> None:
        if thread.parked and thread.token == token:
            thread.timed_out = True
            self.wake(thread)

    def _leave(self, thread: Thread) -> None:
        if thread.interrupt is not None:
            thread.interrupt.leaves()
        self.hub.switch()
        if self.over:
            raise greenlet.GreenletExit
        if thread.interrupt is not None:
            thread.interrupt.returns()

    # ---- processes --------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """End a process at once, wherever its threads are."""
        if process.dead:
            return
        self.note(f"KILL {process}")
        process.dead = True
        for descriptor in list(process.descriptors.values()):
            descriptor.close()
        process.descriptors.clear()

    def stop(self, process: Process, seconds: float) -> None:
        """Have a process stand still for a while, as SIGSTOP does."""
        self.note(f"STOP {process} for {seconds:.2f} s")
        process.stopped_until = max(process.stopped_until, self.now + seconds)
        self.at(process.stopped_until, lambda: self._continue(process))

    def resume(self, process: Process) -> None:
        """Have a process go on that was stopped for longer, as SIGCONT does."""
        process.stopped_until = min(process.stopped_until, self.now)
        self._continue(process)

    def _continue(self, process: Process) -> None:
        if self.now >= process.stopped_until:
            held, process.held = process.held, []
            self._runnable += held

    # ---- the loop ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Have `run` return."""
        self._done = True

    def run(self) -> None:
        """Run until `finish`.

        Raises:
            StuckError: nothing can ever happen any more, or time stands still.
        """
        runnable, timers, draw = self._runnable, self._timers, self._draw
        set_loop = asyncio._set_running_loop
        try:
            while not self._done:
                if runnable:
                    index = int(draw() * len(runnable))
                    thread = runnable[index]
                    last = runnable.pop()
                    if last is not thread:
                        runnable[index] = last
                    process = thread.process
                    if process.dead:
                        continue
                    if process.stopped_until > self.now:
                        process.held.append(thread)
                        continue
                    self.steps += 1
                    if self.steps > STEPS_MOST:
                        raise StuckError(f"{self.steps} steps; now runs {thread}")
                    if self._alarm is not None and self.steps >= self._alarm[0]:
                        self.wake(self._alarm[1])
                    self.current = thread
                    set_loop(thread.loop)
                    thread.greenlet.switch()
                    set_loop(None)
                    self.current = None
                elif timers:
                    when, _, what = heapq.heappop(timers)
                    if when > self.now:
                        self.now = when
                    what()
                else:
                    raise StuckError("expected something to happen some day; nothing does")
        finally:
            set_loop(None)
            self.current = None

    def end(self) -> None:
        """Unwind what is left, without effect."""
        self.over = True
        for thread in self._threads:
            if thread.greenlet.gr_frame is not None and not thread.greenlet.dead:
                thread.greenlet.throw(greenlet.GreenletExit)
        self._threads.clear()
        self._runnable.clear()
        self._timers.clear()
        self.processes.clear()


class Loop(asyncio.AbstractEventLoop):
    """The event loop of one thread: a queue of handles that the scheduler comes to."""

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self._world = process.world
        self._ready: deque[asyncio.Handle] = deque()
        self._idle = False
        self._executor: Any = None
        self.executors: Callable[[], Any] | None = None
        """Makes the executor of `run_in_executor(None, ...)`."""
        self.thread = self._world.spawn(process, name, self._serve)
        self.thread.loop = self

    def _serve(self) -> None:
        world = self._world
        while not world.over:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
                if world.over:
                    return
                if self._ready:
                    world.point()
            self._idle = True
            world.block()
            self._idle = False

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if self._idle:
            self._world.wake(self.thread)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._world.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def fire() -> None:
            if not handle.cancelled():
                self._ready.append(handle)
                if self._idle:
                    self._world.wake(self.thread)

        self._world.at(when, fire)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: `fire` looks."""

    def time(self) -> float:
        return self._world.now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name or "task", context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        if executor is None:
            if self._executor is None and self.executors is not None:
                self._executor = self.executors()
            executor = self._executor
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not self._world.over and isinstance(error, Exception):
            self._world.note(f"loop: {context.get('message')}: {error!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False
