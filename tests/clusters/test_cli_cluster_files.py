"""`tensorvine cluster-files`: what it fills in and refuses, and that what it writes is as valid as what it took."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorvine.clusters.cli.main import application, main
from tensorvine.clusters.files import HERE, KINDS
from typer.testing import CliRunner

VALUES = {
    "extras": "torch",
    "head-ip": "192.0.2.1",
    "worker-ips": "192.0.2.2,192.0.2.3",
    "ssh-user": "ada",
    "nodes": "9",
    "image": "registry.example:5000/ml/vine:7",
    "bucket": "my-bucket",
    "project": "my-project",
    "ami": "ami-0123",
    "path": "/scratch/models",
    "codec": "zstd(5)",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A file of that name, and its neighbour: nothing reads them here."""
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "constraints.txt").touch()
    (folder / "tensorvine-0.2.0-py3-none-any.whl").touch()
    return folder / "tensorvine-0.2.0-py3-none-any.whl"


def command(*words: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(application(), ["cluster-files", *map(str, words)])
    return done.exit_code, done.stdout, re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)


def flags(kind: str, wheel: Path) -> list[str]:
    """Every flag that a kind knows."""
    values = {**VALUES, "wheel": str(wheel)}
    known = [blank.replace("_", "-") for blank in KINDS[kind].blanks]
    return [word for name in known for word in (f"--{name}", values[name])]


class TestFilled:
    @pytest.mark.parametrize("kind", KINDS)
    def test_each_example_stands_in_the_files(self, kind: str) -> None:
        texts = "".join((HERE / file).read_text() for file in KINDS[kind].files)
        for blank in KINDS[kind].blanks.values():
            for example in blank.stands:
                assert example in texts

    @pytest.mark.parametrize("kind", KINDS)
    def test_with_every_flag_nothing_is_left(self, kind: str, wheel: Path, tmp_path: Path) -> None:
        code, out, err = command(kind, tmp_path / "here", *flags(kind, wheel))
        assert (code, err) == (0, "")
        written = [tmp_path / "here" / Path(file).name for file in (*KINDS[kind].files, *KINDS[kind].shared)]
        assert out.splitlines() == [str(path) for path in written]
        for path in written[: len(KINDS[kind].files)]:
            text = path.read_text()
            assert "YOUR-" not in text
            assert "clusters/" not in text
            if kind not in ("slurm", "pbs"):  # which name a wheel in their first lines
                assert "0.1.0-py3" not in text

    @pytest.mark.parametrize("kind", KINDS)
    def test_without_flags_the_files_differ_in_their_own_place_alone(self, kind: str, tmp_path: Path) -> None:
        code, _, _ = command(kind, tmp_path)
        assert code == 0
        for file in (*KINDS[kind].files, *KINDS[kind].shared):
            text = (tmp_path / Path(file).name).read_text()
            for placed in (file, "batch/install.sh"):
                text = text.replace(f"{tmp_path}/{Path(placed).name}", f"clusters/{placed}")
            assert text == (HERE / file).read_text()

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("ray-up")])
    def test_ray_accepts_what_is_filled_in(self, kind: str, wheel: Path, tmp_path: Path) -> None:
        from ray.autoscaler._private.util import prepare_config, validate_config

        command(kind, tmp_path, *flags(kind, wheel))
        config: dict[str, Any] = yaml.safe_load((tmp_path / Path(KINDS[kind].files[0]).name).read_text())
        validate_config(prepare_config(config))
        assert config["auth"]["ssh_user"] == "ada"
        mounts = config["file_mounts"]
        assert mounts[f"~/tensorvine/{wheel.name}"] == str(wheel)
        assert mounts["~/tensorvine/constraints.txt"] == str(wheel.parent / "constraints.txt")
        assert mounts["~/tensorvine/install.sh"] == str(tmp_path / "install.sh")
        assert any(f"/{wheel.name} ray,torch)" in line for line in config["setup_commands"])
        assert "--codec 'zstd(5)'" in config["head_start_ray_commands"][-1]

    def test_hosts_are_those_of_the_flags(self, tmp_path: Path) -> None:
        command("ray-up-hosts", tmp_path, "--head-ip", "192.0.2.1", "--worker-ips", "192.0.2.2,192.0.2.3")
        config = yaml.safe_load((tmp_path / "hosts.yaml").read_text())
        expected = {"type": "local", "head_ip": "192.0.2.1", "worker_ips": ["192.0.2.2", "192.0.2.3"]}
        assert config["provider"] == expected
        assert (config["min_workers"], config["max_workers"]) == (2, 2)

    def test_every_pod_has_the_image_of_the_flag(self, tmp_path: Path) -> None:
        command("kuberay", tmp_path, "--image", VALUES["image"])
        *_, manifest = yaml.safe_load_all((tmp_path / "raycluster.yaml").read_text())
        groups = (manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"])
        images = {one["image"] for group in groups for one in group["template"]["spec"]["containers"]}
        assert images == {VALUES["image"]}
        assert f"-t {VALUES['image']} dist/" in (tmp_path / "Dockerfile").read_text()

    def test_every_pod_of_a_dask_has_the_image_of_the_flag(self, tmp_path: Path) -> None:
        command("dask-kubernetes", tmp_path, "--image", VALUES["image"])
        *_, manifest = yaml.safe_load_all((tmp_path / "daskcluster.yaml").read_text())
        pods = [manifest["spec"][kind]["spec"] for kind in ("scheduler", "worker")]
        assert {one["image"] for pod in pods for one in pod["containers"]} == {VALUES["image"]}

    @pytest.mark.parametrize("kind", ["slurm", "pbs"])
    def test_the_environment_goes_before_what_is_filled_in(self, kind: str, wheel: Path, tmp_path: Path) -> None:
        command(kind, tmp_path, *flags(kind, wheel))
        script = (tmp_path / f"{kind}.sh").read_text()
        shown = "\n".join([line for line in script.splitlines() if line.startswith("export ")] + ["env"])
        names = ("WHEEL", "EXTRAS", "PATH", "CODEC")
        for given in ({}, {"TENSORVINE_PATH": "/elsewhere", "TENSORVINE_EXTRAS": ""}):
            said = subprocess.run(
                ["/bin/bash", "-euc", shown], env={"HOME": "/h", **given}, capture_output=True, text=True, check=True
            ).stdout.splitlines()
            expected = dict(zip(names, (str(wheel), "torch", "/scratch/models", "zstd(5)"), strict=True))
            expected = {f"TENSORVINE_{name}": value for name, value in expected.items()} | given
            assert {f"{name}={value}" for name, value in expected.items()} <= set(said)
        assert f"{'--nodes' if kind == 'slurm' else 'select'}=9\n" in script

    def test_what_is_still_to_be_filled_in_is_named(self, tmp_path: Path) -> None:
        code, out, _ = command("ray-up-gcp", tmp_path, "--bucket", "my-bucket")
        assert code == 0
        left = [line for line in out.splitlines() if line.startswith("still")]
        assert [line.partition(", ")[0] for line in left] == [
            "still to be filled in: --project",
            "still to be filled in: --wheel",
        ]
        assert "YOUR-PROJECT in gcp.yaml" in left[0]


class TestRefused:
    def test_a_kind_that_is_none_names_those_that_are(self, tmp_path: Path) -> None:
        code, out, err = command("heroku", tmp_path)
        assert (code, out) == (2, "")
        for kind in KINDS:
            assert kind in err

    def test_a_flag_of_another_kind_names_those_of_this(self, tmp_path: Path) -> None:
        code, out, err = command("slurm", tmp_path, "--bucket", "x", "--head-ip", "192.0.2.1")
        assert (code, out) == (2, "")
        assert "slurm does not accept --head-ip, --bucket" in err
        assert "--wheel" in err
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("kind", "flag", "value"),
        [
            ("ray-up-hosts", "--path", "/a $(reboot)"),
            ("ray-up-hosts", "--path", "models"),
            ("ray-up-hosts", "--path", "s3://user:word@host/x"),
            ("ray-up-hosts", "--head-ip", "1.2.3.4\nx: y"),
            ("ray-up-hosts", "--worker-ips", "192.0.2.1,,192.0.2.2"),
            ("ray-up-aws", "--bucket", "a'b"),
            ("slurm", "--codec", "lzma(3)"),
            ("slurm", "--codec", "zstd(3)'; reboot"),
            ("pbs", "--nodes", "0"),
            ("pbs", "--wheel", "/nowhere/tensorvine.whl"),
            ("kuberay", "--image", "a b"),
            ("kuberay", "--extras", "torch]; x"),
        ],
    )
    def test_a_value_that_is_none_is_wrong_usage(self, kind: str, flag: str, value: str, tmp_path: Path) -> None:
        code, out, err = command(kind, tmp_path, flag, value)
        assert (code, out) == (2, "")
        assert flag in err
        assert not list(tmp_path.iterdir())

    def test_a_wheel_without_constraints_beside_it_is_wrong_usage(self, wheel: Path, tmp_path: Path) -> None:
        (wheel.parent / "constraints.txt").unlink()
        code, _, err = command("slurm", tmp_path / "here", "--wheel", wheel)
        assert code == 2
        assert "constraints.txt" in err

    def test_what_is_there_is_left_unless_forced(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "job.sh").write_text("mine")
        with pytest.raises(SystemExit) as ended:
            main(["cluster-files", "slurm", str(tmp_path)])
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (1, "")
        assert err.startswith(f"tensorvine: {tmp_path}: expected that none of the files exists; found job.sh")
        assert [path.name for path in tmp_path.iterdir()] == ["job.sh"]
        assert command("slurm", tmp_path, "--force")[0] == 0
        assert (tmp_path / "job.sh").read_text() == (HERE / "batch/job.sh").read_text()

    def test_a_folder_that_cannot_be_made_is_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(SystemExit) as ended:
            main(["cluster-files", "slurm", str(tmp_path / "file" / "below")])
        assert ended.value.code == 1
        assert capsys.readouterr().err.count("\n") == 1
