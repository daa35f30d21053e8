"""Runs that an earlier llmtrain saved mean the same today: they continue, generate, score and export as they did then."""

import contextlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from tests.support import before

_ARCHIVES = Path(__file__).parents[1] / "data" / "before"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of the archives' projects, unpacked."""
    folder = tmp_path_factory.mktemp("before")
    for name in before.ARCHIVES:
        with tarfile.open(_ARCHIVES / f"{name}.tar.xz") as archive:
            archive.extractall(folder / name, filter="data")
    return folder


@pytest.fixture
def project(folder, name) -> Path:
    """The project of the model's archive."""
    return next(folder / archive for archive, models in before.ARCHIVES.items() if name in models)


@pytest.fixture
def expected(project) -> dict[str, Any]:
    return json.loads((project / "expected.json").read_text())


@pytest.fixture
def command(monkeypatch, capsys) -> before.Command:
    """A command of llmtrain, run in this process."""

    def run(folder: Path, *arguments: str) -> str:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    return run


def assert_same_numbers(found: dict[str, float], expected: dict[str, Any], *path: str) -> None:
    """Within the rounding of fp32 sums, which other processors and numbers of threads sum in another order."""
    numbers = expected
    for name in path:
        numbers = numbers[name]
    assert found == pytest.approx(numbers, rel=1e-5)


@pytest.mark.parametrize("name", before.RANKS)
def test_a_run_of_before_is_whole_and_its_yaml_is_valid(project, name, command):
    assert "step-00000004: good" in command(project, "checkpoint", "verify", name)
    assert "OK" in command(project, "check", f"{name}.yaml")


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.ci), 2])
@pytest.mark.parametrize("name", before.RANKS)
def test_a_run_of_before_continues_with_the_same_losses(ranks, project, expected, name, size):
    def train(folder: Path, *arguments: str, ranks: int) -> None:
        group.run(_train, folder, arguments)

    group = ranks(size)
    assert_same_numbers(before.continued(project, name, size, train), expected, name, f"losses on {size}")


def _train(folder: Path, arguments: tuple[str, ...]) -> None:
    """On each rank: as a launcher's process would."""
    with contextlib.chdir(folder):
        assert main(["train", *arguments]) == 0


@pytest.mark.parametrize("name", before.RANKS)
def test_a_checkpoint_of_before_generates_and_scores_the_same(project, expected, name, command):
    assert before.generated(project, name, command) == expected[name]["generated"]
    assert_same_numbers(before.scored(project, name, command), expected, name, "scored")


@pytest.mark.parametrize("name", [name for name in before.RANKS if name not in before.UNPUBLISHED])
def test_a_checkpoint_of_before_exports_the_same_bytes(project, expected, name, command):
    assert before.exported(project, name, command) == expected[name]["exported"]
