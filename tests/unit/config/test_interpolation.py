"""References in files of other programs, and what OmegaConf may take to resolve the hard ones."""

import time

from omegaconf import OmegaConf

from llmtrain.config import interpolation
from llmtrain.config.interpolation import resolve
from llmtrain.config.yaml_source import YamlSource


def resolved(**data: object) -> YamlSource:
    source = YamlSource("file", data)
    resolve(source, None)
    return source


def test_values_of_another_program_mean_what_omegaconf_makes_of_them():
    source = resolved(a="???", none=None, text="x/${none}", name="none", computed="${${name}}/y")
    assert source.problems == []
    assert (source.data["a"], source.data["text"], source.data["computed"]) == ("???", "x/None", "None/y")


def test_an_escaped_reference_stays_one_where_another_value_refers_to_it():
    source = resolved(a=r"\${b}", c="${oc.decode:'1'}${a}")
    assert (source.problems, source.data) == ([], {"a": "${b}", "c": "1${b}"})


def test_one_interpolation_that_takes_too_long_ends_the_hard_ones(monkeypatch):
    calls: list[object] = []

    def slow(tree: object) -> object:
        calls.append(tree)
        time.sleep(10)
        return tree

    monkeypatch.setattr(interpolation, "_HARD_SECONDS", 0.1)
    monkeypatch.setattr(OmegaConf, "create", slow)
    source = resolved(a="${oc.decode:1}", b="${oc.decode:2}")
    assert len(calls) == 1 and {problem.path for problem in source.problems} == {"a", "b"}


def test_references_inside_names_are_followed_here_however_many(monkeypatch):
    monkeypatch.setattr(interpolation, "_MAX_HARD", 0)  # texts for OmegaConf
    sizes = {"small": 1, "large": 2}
    source = resolved(
        size="large", kind="size", sizes=sizes, one="${sizes.${size}}", two="${sizes.${${kind}}}-${${kind}}"
    )
    assert source.problems == []
    assert (source.data["one"], source.data["two"]) == (2, "2-large")
