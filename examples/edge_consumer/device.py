"""The device: follows a model through Redis and answers with it, without Ray.

The URL of the server comes from the environment, because it can contain a password. The arguments are the names of the
repository and of the model, and the number of the last version.
"""

import os
import sys
import time

import numpy as np
from curve import Wave, truth
from tensorvine.actors import EdgeConsumer

URL = "EDGE_CONSUMER_REDIS"
PATIENCE_S = 60.0
ASK_S = 0.05
"""Seconds between two answers if there is no new version."""


def main(repository: str, name: str, until: int) -> None:
    """Answer, and print each new version, up to number `until`."""
    x = np.linspace(-2, 2, 50, dtype=np.float32)
    answers, ref = 0, None
    with EdgeConsumer(os.environ[URL], name, Wave, repository=repository) as consumer:
        print(f"device: process {os.getpid()}; {_engine()}")
        deadline = time.monotonic() + PATIENCE_S
        while (ref is None or ref.version < until) and time.monotonic() < deadline:
            newest = consumer.wait_newer(ref.version if ref is not None else 0, timeout=ASK_S)
            notified = time.time()
            if newest is not None:
                ref = newest
                consumer.wait_for(ref.version)
                swapped = time.time()
                saved = consumer.info(ref).created.timestamp()  # by the same clock, as this is the same machine
                error = float(np.sqrt(np.mean((consumer.infer(x).outputs - truth(x)) ** 2)))
                print(
                    f"device: {ref!s:<8} notified {1e3 * (notified - saved):7.2f} ms after it was saved, "
                    f"answers {1e3 * (swapped - notified):6.2f} ms later; error {error:.4f}"
                )
                deadline = time.monotonic() + PATIENCE_S
            elif ref is not None:
                answers += consumer.infer(x).ref == consumer.ref
    print(f"device: {ref} answers at the end, after {answers} answers in between; {_engine()}")


def _engine() -> str:
    return f"'ray' in sys.modules is {'ray' in sys.modules}"


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except KeyboardInterrupt:
        sys.exit(130)
