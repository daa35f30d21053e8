"""Modules that Composer is imported without."""

import importlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from llmtrain.train.composer_import import Reduced, import_composer


@pytest.fixture
def package(tmp_path, monkeypatch):
    for path, text in {
        "slow_package/__init__.py": "from slow_package import inner\nvalue = 7\n",
        "slow_package/inner/__init__.py": "class Kind:\n    pass\n",
        "slow_package-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: slow_package\nVersion: 1.2\n",
        "user_of_it.py": "import slow_package\nfrom slow_package import inner, value\nfrom slow_package.inner import Kind\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "slow_package"
    for name in ("user_of_it", "slow_package", "slow_package.inner"):
        sys.modules.pop(name, None)


def test_an_optional_package_has_neither_modules_nor_a_version_in_the_context_alone(package):
    with Reduced((package,)):
        with pytest.raises(ModuleNotFoundError, match="No module named 'slow_package'"):
            importlib.import_module(package)
        with pytest.raises(PackageNotFoundError):
            version(package)
        assert version("pytest")
    assert importlib.import_module(package).value == 7 and version(package) == "1.2"


def test_a_deferred_package_is_imported_at_its_first_use(package):
    with Reduced((), (package,)):
        user = importlib.import_module("user_of_it")
    assert not any(name.startswith(package) for name in sys.modules)
    assert not isinstance(3, user.Kind) and f"{package}.inner" in sys.modules
    real = importlib.import_module(package)
    assert user.slow_package.value == real.value and user.inner.Kind is real.inner.Kind
    thing = user.Kind()
    assert type(thing) is real.inner.Kind and isinstance(thing, user.Kind)
    with pytest.raises(AttributeError):
        user.slow_package.nothing  # noqa: B018


def test_a_module_alone_is_deferred(package):
    with Reduced((), (f"{package}.inner",)):
        outer = importlib.import_module(package)
        assert outer.value == 7
    assert f"{package}.inner" not in sys.modules
    assert outer.inner.Kind is importlib.import_module(f"{package}.inner").Kind


@pytest.mark.parametrize("kinds", [("slow_package",), ("other", "slow_package")])
def test_a_package_that_is_imported_already_stays(package, kinds):
    module = importlib.import_module(package)
    with Reduced(kinds[:1], kinds[1:]):
        assert importlib.import_module(package) is module
    assert sys.modules[package] is module


def test_composers_record_of_the_machine_starts_no_process(monkeypatch):
    import_composer()
    from composer.utils import get_composer_env_dict

    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    assert get_composer_env_dict()["composer_version"] == version("mosaicml")
