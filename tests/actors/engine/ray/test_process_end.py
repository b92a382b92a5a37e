"""A process leaves Ray while it still looks for an actor."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import ray

PROGRAM = textwrap.dedent("""
    import sys, threading, time
    import ray
    from tensorvine.actors.engine.ray.engine import RayEngine
    from tensorvine.actors.rpc.calls import remote
    from tensorvine.actors.rpc.channel import Channel

    WAITING = ("get_objects", "wait")  # in Ray, or outside of it

    class Calls:
        @remote("ctl")
        def answer(self) -> int: ...

    class Actor:
        def tensorvine_reach(self, node: str, user: int) -> None: ...

    def thread(name):
        return next((each for each in threading.enumerate() if each.name == name), None)

    ray.init("auto", log_to_driver=False)
    pending = ray.remote(resources={"nowhere": 1})(Actor).remote()
    Channel(RayEngine(), "an actor", actor=pending).post(Calls.answer())
    while (looks := thread("tensorvine-locate")) is None:
        time.sleep(0.01)
    while (frame := sys._current_frames().get(looks.ident)) is None or frame.f_code.co_name not in WAITING:
        time.sleep(0.01)
    ray.shutdown()
    looks.join(60)
    thread("tensorvine-calls").join(0.1)
    assert thread("tensorvine-calls") is not None
""")


@pytest.mark.usefixtures("cluster")
def test_a_call_that_waits_for_an_actor_prints_no_traceback() -> None:
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
