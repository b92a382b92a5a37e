"""Options and completion: what is written wrongly is said before anything starts."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import dask
import pytest
import typer
from tensorvine.clusters.cli import main as cli
from tensorvine.clusters.cli.main import application, main
from tensorvine.clusters.cli.options import count_from, keep_from, nodes_from, scaling_from
from tensorvine.clusters.client import EngineName, place_of
from tensorvine.planner.scaling import ScalePolicy
from tensorvine.store.errors import EngineUnavailableError, StorageError
from tensorvine.store.versions.retention import KeepBest, KeepBytes, KeepEvery, KeepLast
from typer.testing import CliRunner, Result

KEEP = "expected last(N), best(N), every(N) or bytes(SIZE), joined by '|'"
SCALING = "expected some of least=N, most=N, full=NUMBER"
SHELLS = {"bash": "complete -o default", "zsh": "#compdef", "fish": "complete --command", "pwsh": "Register-Argument"}


def invoked(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(application(), list(words), env=environment, prog_name="tensorvine")


def flat(text: str) -> str:
    """Text without the frame and the breaks of lines that an error of usage has."""
    return re.sub(r"[\s│]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))


class TestTexts:
    def test_a_policy_of_what_stays_in_memory(self) -> None:
        assert keep_from("last(3)") == KeepLast(3)
        assert keep_from("last(3)|best(1)") == KeepLast(3) | KeepBest(1)
        assert keep_from(" every(10) | bytes(1.5GB) ") == KeepEvery(10) | KeepBytes(1_500_000_000)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "last",
            "last()",
            "last(0)",
            "last(x)",
            "last(1,2)",
            "newest(3)",
            "last(3)|",
            "bytes(4XB)",
            "last(1)best(1)",
        ],
    )
    def test_a_wrong_policy_says_what_was_expected(self, text: str) -> None:
        with pytest.raises(typer.BadParameter) as refused:
            keep_from(text)
        assert KEEP in str(refused.value)
        assert text in str(refused.value)

    def test_nodes_that_hold_shards(self) -> None:
        assert nodes_from("tensorvine=1,zone=eu a, GPU=0.5") == {"tensorvine": 1.0, "zone": "eu a", "GPU": 0.5}

    @pytest.mark.parametrize("text", ["", "tensorvine", "=1", "tensorvine=", "a=1,a=2", "a=0", "a=-1", "a=nan", "a=1,"])
    def test_what_selects_no_nodes_is_refused(self, text: str) -> None:
        with pytest.raises(typer.BadParameter, match="expected"):
            nodes_from(text)

    def test_the_former_meaning_is_told(self) -> None:
        with pytest.raises(typer.BadParameter, match="use --wait-nodes 4"):
            nodes_from("4")

    @pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5", "pernode", "²"])
    def test_what_is_no_number_of_shards_is_refused(self, text: str) -> None:
        with pytest.raises(typer.BadParameter, match="expected a number of at least 1, or per-node"):
            count_from(text)

    def test_when_shards_join_and_drain(self) -> None:
        text = "least=2, most=8,full=0.5,requests_per_s=100,join_after_s=1,drain_after_s=inf"
        assert scaling_from(text) == ScalePolicy(2, 8, 0.5, 100.0, 1.0, float("inf"))

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (text, SCALING)
            for text in ("", "least", "least=", "least=1.5", "most=x", "fewest=1", "least=1,least=2", "full=1,")
        ]
        + [("least=0", "least: expected at least 1"), ("least=3,most=2", "most: expected at least 3, the value")]
        + [("full=2", "full: expected a share above 0"), ("full=nan", "full: expected a share above 0")],
    )
    def test_wrong_scaling_says_what_was_expected(self, text: str, said: str) -> None:
        with pytest.raises(typer.BadParameter, match=re.escape(said)):
            scaling_from(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--store-bytes", "4XB"], "--store-bytes: expected bytes, such as 1000, 4GB (of 1000) or 512MiB"),
        (["up", "--store-bytes", "0"], "--store-bytes: expected at least 1 byte; found '0'"),
        (["up", "--preallocate", "some"], "--preallocate: expected bytes"),
        (["up", "--keep", "lost(3)"], f"--keep: {KEEP}"),
        (["up", "--scaling", "least=x"], f"--scaling: {SCALING}"),
        (["up", "--wait-nodes", "0"], "--wait-nodes"),
        (["up", "--redis", "server:6379"], "--redis: up: redis: expected a URL such as 'redis://host:6379/0'"),
        (["up", "--nodes", "1"], "use --wait-nodes 1"),
        (["up", "--shards", "0"], "--shards"),
        (["up", "--keep", "last(1)"], "--keep: expected it only with --path"),
        (["scale", "9" * 5000], "expected a number of at least 1, or per-node"),
        (["scale"], "Missing argument 'N'"),
        (["scale", "0"], "expected a number of at least 1, or per-node; found '0'"),
        (["scale", "two"], "expected a number of at least 1, or per-node; found 'two'"),
        (["scale", "2", "--timeout", "nan"], "--timeout': expected at least 0 seconds; found nan"),
        (["retire"], "Missing argument 'MODEL...'"),
        (["export", "m"], "Missing argument"),
        (["import", "m.arrow"], "Missing argument 'NAME'"),
        (["import", "m.arrow", "m", "--quality", "good"], "--quality"),
        (["flush", "--timeout", "-1"], "expected at least 0 seconds; found -1"),
        (["wait"], "Missing argument"),
        (["wait", "m", "--timeout", "soon"], "--timeout"),
        (["top", "--json"], "--json: expected it only with --once"),
        (["top", "--interval", "0"], "expected at least 0.1 seconds; found 0"),
        (["top", "--interval", "nan"], "expected at least 0.1 seconds; found nan"),
        (["ls", "--address", "a:1", "--scheduler", "b:1"], "--address: an address of Ray; expected it without"),
        (["up", "--engine", "dask", "--address", "a:1"], "--address: an address of Ray; expected it without"),
        (["up", "--engine", "ray", "--scheduler", "b:1"], "--scheduler: an address of Dask; expected it without"),
        (["up", "--engine", "spark"], "'spark' is not one of 'ray', 'dask'"),
        (["up", "--engine", "dask"], "--engine: expected --scheduler HOST:PORT or DASK_SCHEDULER_ADDRESS with dask;"),
        (
            ["up", "--scheduler", "b:1", "--port", "0"],
            "--port: expected it only with Ray; this command",
        ),
        (["ls", "--scheduler", "nonsense"], "--scheduler: expected HOST:PORT; found 'nonsense'"),
        (["ls", "--scheduler", "host:port"], "--scheduler: engine: expected the address of a Dask scheduler; found"),
        (["--show-completion", "tcsh"], "expected one of bash, zsh, fish, powershell, pwsh; found 'tcsh'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_refused_before_anything_starts(words: list[str], said: str) -> None:
    ended = invoked(*words)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert said in flat(ended.stderr)


RAY, DASK = {"RAY_ADDRESS": "ray:1"}, {"DASK_SCHEDULER_ADDRESS": "dask:1"}


class TestPlace:
    """Which cluster is meant."""

    @pytest.mark.parametrize(
        ("given", "engine", "named", "meant"),
        [
            ((None, None), None, RAY, "Ray at ray:1"),
            ((None, None), None, DASK, "Dask at tcp://dask:1"),
            ((None, None), None, DASK | {"RAY_ADDRESS": "local"}, "Dask at tcp://dask:1"),
            ((None, None), "ray", RAY | DASK, "Ray at ray:1"),
            ((None, None), "dask", RAY | DASK, "Dask at tcp://dask:1"),
            (("other:1", None), None, RAY | DASK, "Ray at other:1"),
            ((None, "tls://other:1"), None, RAY | DASK, "Dask at tls://other:1"),
            ((None, "other:1"), "dask", RAY | DASK, "Dask at tcp://other:1"),
        ],
    )
    def test_options_go_before_variables(
        self,
        given: tuple[str | None, str | None],
        engine: str | None,
        named: dict[str, str],
        meant: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        name_clusters(named, monkeypatch)
        assert str(place_of(*given, EngineName(engine) if engine is not None else None)) == meant

    def test_dasks_configuration_says_how_schedulers_are_reached(self) -> None:
        with dask.config.set({"distributed.comm.default-scheme": "tls"}):
            assert str(place_of(None, "host:1")) == "Dask at tls://host:1"

    def test_of_two_that_variables_name_none_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name_clusters(RAY | DASK, monkeypatch)
        with pytest.raises(typer.BadParameter, match="expected --address or --scheduler, because both RAY_ADDRESS"):
            place_of(None, None)

    def test_without_ray_and_a_dask_that_is_named_both_ways_are_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name_clusters({}, monkeypatch)
        monkeypatch.setitem(sys.modules, "tensorvine.actors.engine.ray.embedded", None)
        monkeypatch.delattr("tensorvine.actors.engine.ray.embedded", raising=False)
        with pytest.raises(EngineUnavailableError, match=r"WHEEL\[ray\]'\), or pass a Dask with --scheduler"):
            place_of(None, None)


@pytest.mark.parametrize(
    ("configured", "scheme", "said"),
    [
        ({}, "tls", "expected TLS certificates in Dask's configuration (distributed.comm.tls); found none"),
        (
            {"distributed.comm.require-encryption": True},
            "tcp",
            "expected tls://HOST:PORT, because Dask's configuration requires",
        ),
    ],
)
def test_what_does_not_fit_dasks_configuration_of_tls_is_said(
    configured: dict[str, object], scheme: str, said: str
) -> None:
    with dask.config.set(configured):
        ended = invoked("ls", "--scheduler", f"{scheme}://127.0.0.1:9")
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert said in flat(ended.stderr)


def name_clusters(named: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    for variable in (*RAY, *DASK):
        patch.delenv(variable, raising=False)
    for variable, address in named.items():
        patch.setenv(variable, address)


class TestCompletion:
    @pytest.mark.parametrize("shell", SHELLS)
    def test_a_script_is_shown_for_a_named_shell(self, shell: str) -> None:
        ended = invoked("--show-completion", shell)
        assert (ended.exit_code, ended.stderr) == (0, "")
        assert SHELLS[shell] in ended.stdout
        assert f"_TENSORVINE_COMPLETE={'complete_' + shell if shell != 'pwsh' else ''}"[:20] in ended.stdout

    def test_it_is_installed_where_the_shell_finds_it(self, tmp_path: Path) -> None:
        ended = invoked("--install-completion", "bash", HOME=str(tmp_path))
        script = tmp_path / ".bash_completions" / "tensorvine.sh"
        assert (ended.exit_code, ended.stdout.split()[-1]) == (0, os.fspath(script))
        assert "_TENSORVINE_COMPLETE=complete_bash" in script.read_text()
        assert os.fspath(script) in (tmp_path / ".bashrc").read_text()

    @pytest.mark.parametrize(
        ("line", "found"), [("tensorvine s", ["status", "show", "scale"]), ("tensorvine up --sto", ["--store-bytes"])]
    )
    def test_commands_and_options_are_completed(self, line: str, found: list[str]) -> None:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        assert invoked(_TENSORVINE_COMPLETE="complete_bash", **words).stdout.split() == found


class TestSecrets:
    """URLs with passwords in the place of something else."""

    @pytest.mark.parametrize(
        "words",
        [
            ("URL",),
            ("up", "URL"),
            ("up", "--nodes", "URL"),
            ("up", "--scaling", "URL"),
            ("up", "--redis", "xURL"),
            ("up", "--store-bytes", "URL"),
            ("scale", "URL"),
            ("ls", "a", "URL"),
            ("--show-completion", "URL"),
        ],
        ids=" ".join,
    )
    @pytest.mark.parametrize("url", ["redis://:hidden@host/0", "s3://key:hid den@bucket/a?x='hidden'"])
    def test_no_error_of_usage_repeats_one(self, words: tuple[str, ...], url: str) -> None:
        if words == ("up", "--nodes", "URL") and "=" in url:
            pytest.skip("this is the value of a label")
        result = invoked(*(word.replace("URL", url) for word in words))
        assert result.exit_code == 2
        assert not re.search(r"hid ?den|://[^h]", flat(result.output))

    def test_other_errors_repeat_none_with_a_user_or_options(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise StorageError(f"a/b://c: expected x; found {' '.join(words)}")

        monkeypatch.setattr(cli, "application", lambda: fail)
        words = ["redis://:hidden@host", "s3://bucket/a?key=hidden", "s3://other/a"]
        with pytest.raises(SystemExit):
            main(words)
        assert capsys.readouterr().err == "tensorvine: a/b://c: expected x; found (a URL) (a URL) s3://other/a\n"
