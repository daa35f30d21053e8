"""Projects to run commands in."""

import pytest

from tests.support.project import Project


@pytest.fixture
def project(tmp_path, shards) -> Project:
    return Project(tmp_path, shards)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, shards) -> tuple[Project, str]:
    """A project with a complete run of 6 steps on one process, and what it printed."""
    project = Project(tmp_path_factory.mktemp("finished"), shards)
    status, text = project.llmtrain("train", "run.yaml")
    assert status == 0, text
    return project, text
