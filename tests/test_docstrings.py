"""Every module can be imported, and every example in its docstrings does what it shows."""

from __future__ import annotations

import doctest
import importlib
import linecache
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {
    "tensorvine.actors.updates.callback": "keras",
    "tensorvine.actors.updates.ray_serve": "ray.serve",
    "tensorvine.actors.search.deephyper": "deephyper",
    "tensorvine.actors.search.optuna": "optuna",
    "tensorvine.actors.search.tune": "ray.tune",
    **{f"tensorvine.store.keras{part}": "keras" for part in ("", ".configs", ".recipe", ".vertices", ".weights")},
    "tensorvine.store.keras_memory": "keras",
    "tensorvine.store.torch": "torch",
    **{f"tensorvine.actors.training.keras.training{part}": "keras" for part in ("", "_callback", "_gradients")},
    **{f"tensorvine.actors.training.keras.training{part}": "keras" for part in ("_hooks", "_state")},
    **{
        f"tensorvine.actors.training.torch.training{part}": "torch"
        for part in ("", "_gradients", "_optimizer", "_rank")
    },
    **{f"tensorvine.actors.training.torch.training{part}": "torch" for part in ("_reads", "_state", "_updates")},
}
MODULES = [
    ".".join(("tensorvine", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for package in ("store", "planner", "actors", "clusters")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def run_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> doctest.TestResults:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what frameworks say when they are imported
        if name in FRAMEWORKS:
            pytest.importorskip(FRAMEWORKS[name])
        module = importlib.import_module(name)
    assert ROOT in Path(module.__file__ or "").parents
    # doctest makes a debugger for each module, which asks the system for each file that was ever in a traceback
    monkeypatch.setattr(linecache, "checkcache", lambda filename=None: None)
    return doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_examples(name, monkeypatch).failed == 0
