"""The users' metadata: limited by its bytes."""

from __future__ import annotations

import pytest
from tensorvine.store.errors import OptionError
from tensorvine.store.versions.manifest import check_metadata


@pytest.mark.parametrize(("text", "nbytes"), [('{"k": "abc"}', 12), ('{"k": "\N{SNOWMAN}"}', 12)])
def test_metadata_beyond_the_limit_is_refused_by_its_bytes(text: str, nbytes: int) -> None:
    check_metadata("m", text, nbytes)
    with pytest.raises(OptionError, match=rf"save of 'm': metadata: expected at most {nbytes - 1} bytes .* {nbytes}\."):
        check_metadata("m", text, nbytes - 1)
