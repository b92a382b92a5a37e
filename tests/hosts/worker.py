"""What a raylet of a host starts as a worker: Ray's own `default_worker.py`, with gates in the actors."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

from tests.hosts import gates

if __name__ == "__main__":
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    gates.install()
    sys.argv[0] = os.path.join(os.path.dirname(ray.origin), "_private", "workers", "default_worker.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
