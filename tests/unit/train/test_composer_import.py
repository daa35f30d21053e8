"""Packages that Composer is imported without."""

import importlib
import sys

import pytest

from llmtrain.train.composer_import import unavailable


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "slow_package.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "slow_package"
    sys.modules.pop("slow_package", None)


def test_a_package_is_unavailable_in_the_context_alone(package):
    with unavailable(package), pytest.raises(ModuleNotFoundError):
        importlib.import_module(package)
    assert importlib.import_module(package).value == 7


def test_a_package_that_is_imported_already_stays(package):
    module = importlib.import_module(package)
    with unavailable(package):
        assert importlib.import_module(package) is module
    assert sys.modules[package] is module
