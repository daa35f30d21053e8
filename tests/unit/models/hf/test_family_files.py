"""The files of families: how long they are, and that nothing outside them knows a family by its name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

import llmtrain
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Family, UnsupportedModelError, families, family_for_model
from llmtrain.schema.load import load_config

PACKAGE = Path(llmtrain.__file__).parent
FOLDER = PACKAGE / "models" / "hf"
YAMLS = sorted((PACKAGE.parent / "yamls" / "pretrain").glob("*.yaml"))
# Mamba-2 is also the name of a mixer.
NAMES = re.compile(
    r"(?<![a-z])mpt|llama|mistral|qwen|olmo|phi[-_ ]?3|granite|gpt[-_ ]?neox|starcoder|gemma|zamba|nemotron|bamba|falcon"
    r"|zaya|apertus|ministral|ernie",
    re.I,
)
# A rope_type of config.json, which has the name of the first model that had it.
ROPE_TYPE = re.compile(r"llama3(scaling)?$|there are default, linear, llama3 and yarn", re.I)
YAML_NAME = re.compile(r"\b(mpt|zamba2)-[\d.]+b\b")
ELSEWHERE = {
    "models/hf/family.py": "the list of families",
    "models/hf/other_types.py": "types that no family reads",
    "convert/composer.py": "Composer's checkpoints of LLM Foundry's MPT",
    "convert/foundry": "LLM Foundry's YAMLs, whose models are MPT or published ones",
}


def stems() -> list[str]:
    return [family.model_type for family in families()]


def test_a_family_has_200_lines_at_most_on_the_median():
    lines = [len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) for name in stems()]
    assert len(lines) >= 21 and median(lines) <= 200 and max(lines) <= 400


@pytest.mark.parametrize("name", stems())
def test_every_family_has_a_preset(name, presets):
    assert name in presets


def test_no_family_is_named_outside_its_file():
    """In code, that is: docstrings and comments may say whose idea something was, messages which YAMLs there are."""
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        if any(where.startswith(place) for place in ELSEWHERE):
            continue
        own = path.parent == FOLDER and path.stem in stems()
        found += [
            f"{where}:{line}: {text}"
            for line, text in named(path.read_text(encoding="utf-8"), path.stem if own else "")
        ]
    assert not found


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("'''Granite's.'''\nx = 1  # Granite's", []),
        ("if kind == 'qwen3':\n    pass", [1]),
        ("\ndef read_olmo2(config): ...", [2]),
        ("x = block.is_gemma", [1]),
        ("x = LlamaConfig", [1]),
        ("def f(mpt): ...", [1]),
        ("help = 'quickstart or mpt-1b'\nlimit = attempt", []),
        ("x = 'llama3'", []),
    ],
)
def test_names_that_are_found(source, seen):
    assert [line for line, _ in named(source, "")] == seen


def named(source: str, own: str) -> Iterator[tuple[int, str]]:
    """(line, text) of identifiers and strings of a program with the name of a family that is not its own, nor one that it
    imports from."""
    if not NAMES.search(source):  # most files, which need not be parsed
        return
    tree = ast.parse(source)
    imported = " ".join(node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    known = f"{own} {imported if own else ''}".lower()
    for node in ast.walk(tree):
        for text in _texts(node, docstrings):
            names = [match.group().lower() for match in NAMES.finditer(YAML_NAME.sub("", text))]
            if not ROPE_TYPE.search(text) and any(
                re.sub("[-_ ]", "", name) not in re.sub("[-_ ]", "", known) for name in names
            ):
                yield getattr(node, "lineno", 0), text


def _texts(node: ast.AST, docstrings: set[int]) -> list[str]:
    match node:
        case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
            return [text]
        case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
            return [text]
        case ast.Constant(value=str(text)) if id(node) not in docstrings:
            return [text]
        case _:
            return []


@pytest.fixture(scope="module")
def presets() -> set[str]:
    """Families that express a shipped YAML's model; MPT's other ones and those that stand beside kda-130m no class expresses."""
    ours = ("mpt", "kda", "cca", "mamba3", "mla")
    files = [file for file in YAMLS if not file.stem.startswith(ours) or file.stem == "mpt-7b-alibi"]
    models = [load_config(file).model for file in files]
    found = {family_for_model(model).model_type for model in models}
    others = [family for family in families() if family.model_type not in found]
    return found | {family.model_type for family in others if any(expresses(family, model) for model in models)}


def expresses(family: Family, model: ModelConfig) -> bool:
    """True also where a family before it in the list expresses the model as well, and exports take that one."""
    try:
        return bool(family.write_config(model))
    except UnsupportedModelError:
        return False
