"""`Repository.traffic`: the bytes that one client's loads moved."""

from __future__ import annotations

import numpy as np
from tensorvine.actors import Repository, Traffic

from tests.support.far import connect_from_afar

TENSORS = {"large": np.ones((64, 1 << 10), np.float32), "small": np.arange(3)}
NBYTES = sum(each.nbytes for each in TENSORS.values())


def test_loads_are_counted_by_their_transport(repository: Repository) -> None:
    repository.save("m", TENSORS)
    nothing = Traffic(bytes_asked=0, bytes_mapped=0, bytes_moved={}, patches=0, whole=0, fallbacks={})
    with connect_from_afar(repository.name) as far:
        assert repository.traffic() == far.traffic() == nothing
        for _ in range(2):
            repository.load("m")  # the second time without a message
        near = repository.traffic()
        assert (near.bytes_asked, near.bytes_mapped, near.bytes_moved, near.whole) == (2 * NBYTES, 2 * NBYTES, {}, 0)
        kept = far.load("m", transport="socket")
        again = far.load("m", tensors=["small"])  # it is here
        assert again["small"].tolist() == kept["small"].tolist()
        del kept, again
        far.load("m", transport="object_store")
        found = far.traffic()
        assert found.bytes_asked == 2 * NBYTES + TENSORS["small"].nbytes
        assert found.bytes_moved == {"socket": NBYTES, "object_store": NBYTES}
        assert (found.bytes_mapped, found.patches, found.whole, found.fallbacks) == (0, 0, 4, {})
