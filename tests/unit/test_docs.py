"""README and docs: commands that exist, links that lead somewhere, figures that were measured."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from llmtrain.cli import parser
from llmtrain.schema.load import load_config
from scripts import draw_docs
from scripts.generate_reference import anchor_of, outdated, reference
from tests.support import contributing

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "eval" / "README.md"]
PLAIN = re.compile(r"```.*?```|`[^`\n]*`", re.S)
"""Code, in which brackets are no links."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shown_commands(text: str) -> list[str]:
    """Every `llmtrain …` in code: on a line of a block, between backticks, or on a comment line of a YAML."""
    code = text.splitlines() if text.startswith("# yaml-language-server") else []
    code += [line for block in re.findall(r"```.*?```", text, re.S) for line in block.splitlines()]
    code += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [
        found[1]
        for line in code
        if (found := re.match(r"(?:\$ |# *|uv run )*(llmtrain [a-z].*)", " ".join(line.split())))
    ]


def choices(command: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Subcommands by name."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def unknown(command: str) -> list[str]:
    """Words of a command that the parser does not have: verbs and options."""
    command = re.split(r" # |[;&>]", command.replace("\\|", "|"))[0]
    place = parser()
    try:
        words = shlex.split(command)[1:]
    except ValueError:  # prose with an apostrophe
        words = command.split()[1:]
    while words and choices(place) and "…" not in words[0]:
        verbs = [words.pop(0)]
        while words[:1] == ["|"]:
            verbs.append(words[1])
            del words[:2]
        if missing := [verb for verb in verbs if verb not in choices(place)]:
            return missing
        place = choices(place)[verbs[0]]
    options = {option for action in place._actions for option in action.option_strings}
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "yamls").rglob("*.yaml"))], ids=name)
def test_commands_exist_with_the_options_shown(page):
    wrong = {command: unknown(command) for command in shown_commands(page.read_text(encoding="utf-8"))}
    assert {command: words for command, words in wrong.items() if words} == {}


def test_commands_that_do_not_exist_are_found():
    assert unknown("llmtrain trains FILE") == ["trains"]
    assert unknown("llmtrain train FILE --quickly") == ["--quickly"]
    assert unknown("llmtrain checkpoint ls | show | remove") == ["remove"]
    assert unknown("llmtrain bench tune --shape head_dim=96") == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", PLAIN.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+://", link):
            continue
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def test_the_index_has_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", index)}
    pages = {*(ROOT / "docs").glob("*.md"), ROOT / "docs" / "reference" / "README.md"} - {ROOT / "docs" / "README.md"}
    assert sorted(map(name, pages - linked)) == []


def anchors(page: Path) -> list[str]:
    return [anchor_of(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)]


def speed_rows() -> list[tuple[str, str]]:
    """(result, anchor in BENCHMARKS.md) of each row of README's speed table."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Speed\n")[2].partition("\n## ")[0]
    rows = [row.strip("|").split("|") for row in section.splitlines() if row.startswith("|")][2:]
    return [(row[1], link[1] if (link := re.search(r"BENCHMARKS\.md#([\w-]+)", row[2])) else "") for row in rows]


@pytest.mark.parametrize(("result", "anchor"), speed_rows(), ids=lambda part: part.strip()[:40])
def test_figures_of_the_speed_table_stand_in_the_section_named_beside_them(result, anchor):
    parts = re.split(r"^## (.*)$", (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8"), flags=re.M)
    sections = {anchor_of(heading): text for heading, text in zip(parts[1::2], parts[2::2], strict=True)}
    assert anchor in sections
    figures = re.findall(r"(?<![\w.-])\d+\.\d+", result)
    assert figures, "a row of the speed table has no figure"
    measured = set(re.findall(r"(?<![\w.])\d+\.\d+", sections[anchor]))
    assert [figure for figure in figures if figure not in measured] == []


def test_the_readmes_config_is_valid(tmp_path):
    text = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[0]
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml").name == "my-run"


def test_the_code_tour_is_of_files_that_exist():
    tour = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition("## Dive into the code\n")[2].partition("\n## ")[0]
    )
    files = re.findall(r"^\d+\. \[(llmtrain/[\w/.]+)\]\(\1\)", tour, re.M)
    assert 6 <= len(files) <= 8 and all((ROOT / file).is_file() for file in files)


def test_the_committed_schemas_and_reference_are_the_generated_ones():
    assert outdated() == [], "run `python scripts/generate_reference.py`"


def test_the_reference_has_every_type_of_block_and_explains_what_may_change_on_resume():
    pages = reference()
    for kind in (
        "attention",
        "compressed_attention",
        "gated_deltanet",
        "kimi_delta",
        "mamba2",
        "mamba3",
        "parallel_mixers",
        "shared_attention",
    ):
        assert f"## `model.blocks.NAME` with `type: {kind}`" in pages["blocks.md"]
    assert "| `d_conv` | an integer above 0 and at most 131072 | `4` | fixed | Kernel width" in pages["blocks.md"]
    assert re.search(r"^\| `chunk_size` \| .* \| may change \|", pages["blocks.md"], re.M)
    assert re.search(r"^\| `interval` \| .* \| may change \|", pages["checkpoint.md"], re.M)


def test_pictures_are_drawn_and_shown(tmp_path):
    draw_docs.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    shown = {link for page in PAGES for link in re.findall(r"\(pictures/([\w.-]+)\)", page.read_text(encoding="utf-8"))}
    assert drawn == shown == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}


@pytest.mark.parametrize("page", contributing.PAGES, ids=lambda page: page.stem)
def test_edits_of_an_extending_page_fit_the_tree(page):
    """Every old line of a diff stands once where the page names it; test_contributing.py runs what comes of it."""
    example = contributing.parse(page.read_text(encoding="utf-8"))
    texts: dict[str, str] = {}
    for path, body in example.edits:
        before = texts.get(path) or (contributing.ROOT / path).read_text(encoding="utf-8")
        texts[path] = contributing.edited(before, body, path)
    assert not [path for path, _ in example.files if (contributing.ROOT / path).exists()]
