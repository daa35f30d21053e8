"""Write every file that is generated: JSON schemas for editors, the key reference, and the migration page's table of keys."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from llmtrain.config.base import Section
from llmtrain.config.schema_tree import (
    alternatives_of,
    constrained_type,
    default_value,
    describe,
    is_free,
    is_section,
    sections_by_type,
    usual_type,
)
from llmtrain.config.setting_texts import setting_texts
from llmtrain.convert.foundry.keys import table
from llmtrain.eval.report.gauntlet import Gauntlet
from llmtrain.eval.run_config import EvalRun
from llmtrain.eval.tasks.config import TaskConfig
from llmtrain.schema.config import Config
from llmtrain.schema.json_schema import schema_text

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
MIGRATION = ROOT / "docs" / "migrating-from-llm-foundry.md"
NOTE = "<!-- Generated from the schema: python scripts/generate_reference.py -->\n"
ABOUT = """Every key of every YAML, generated from the classes that decode it. Unknown keys and values of another type
are errors; `llmtrain check FILE` reports all of them at once, and the rules that connect several keys.

Any value may be an interpolation: `${section.key}` is the value of another key, `${oc.env:NAME}` that of an environment
variable, as text; where a number belongs, `${oc.decode:${oc.env:NAME}}`. A length of training is a number with a unit:
`300 steps`, `26e9 tokens`, `2 epochs`, or `5 %` of the run.

*On resume*: a key that "may change" can have another value when the same run is started again. A change of a "fixed" key
is refused, because it would be another experiment; `llmtrain train FILE --fresh` then starts anew."""


def main() -> None:
    files = generated()
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in set(PAGES.iterdir()) - files.keys():
        path.unlink()


def outdated() -> list[str]:
    """Names of the files that differ from what the schema gives, and of pages that it does not give."""
    files = generated()
    committed = {path: path.read_text(encoding="utf-8") for path in {*files, *PAGES.iterdir()} if path.exists()}
    return sorted(
        str(path.relative_to(ROOT)) for path in {*files, *committed} if committed.get(path) != files.get(path)
    )


def generated() -> dict[Path, str]:
    """Text of every generated file by its path."""
    return {
        ROOT / "yamls" / "schema.json": schema_text(),
        ROOT / "eval" / "schema.json": plain_json_schema(EvalRun),
        ROOT / "eval" / "tasks" / "schema.json": plain_json_schema(TaskConfig),
        ROOT / "eval" / "gauntlets" / "schema.json": plain_json_schema(Gauntlet),
        **{PAGES / name: text for name, text in reference().items()},
        **({MIGRATION: migration_page()} if MIGRATION.exists() else {}),
    }


def migration_page() -> str:
    """Text of the migration page, with the table of keys between its two marks."""
    page = MIGRATION.read_text(encoding="utf-8")
    return re.sub(
        r"(<!-- keys: .*? -->\n).*(<!-- end of keys -->)", lambda m: f"{m[1]}{table()}{m[2]}", page, flags=re.S
    )


def plain_json_schema(section: type[Section]) -> str:
    """Text of the JSON schema of a section, without the interpolations that yamls/schema.json allows."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **section.model_json_schema()}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def reference() -> dict[str, str]:
    """Markdown of every page of the key reference by file name, with an index in README.md."""
    pages = [
        *run_pages(Config, "run.md", "The YAML of `llmtrain train`"),
        whole_page(EvalRun, "llmtrain-eval.md", "The YAML of `llmtrain eval`"),
        whole_page(TaskConfig, "task.md", "The YAML of a task"),
        whole_page(Gauntlet, "gauntlet.md", "The YAML of a gauntlet"),
    ]
    index = "\n".join(f"- [{page.title}]({page.file}): {_first_sentence(page.about)}" for page in pages)
    files = {page.file: _page(page, pages) for page in pages}
    return {"README.md": f"{NOTE}# Key reference\n\n{ABOUT}\n\n{index}\n", **files}


@dataclass(frozen=True)
class Place:
    """A section at a path. tag: the `type` that selects it among others there. free: all below it may change on resume. usual: it
    is the one without a `type`."""

    path: str
    section: type[Section]
    tag: str | None = None
    free: bool = False
    usual: bool = False

    @property
    def title(self) -> str:
        names = [f"`{self.path}`"] if self.path else []
        return " with ".join(names + ([f"`type: {self.tag}`"] if self.tag else []))


@dataclass(frozen=True)
class Page:
    """A file of the reference. resume: say which keys may change when a run is resumed."""

    file: str
    title: str
    about: str
    places: list[Place]
    resume: bool = False


def run_pages(root: type[Section], file: str, title: str) -> list[Page]:
    """Pages of a run's YAML: its top level, each section, and each mapping of entries that differ by `type`."""
    pages = [Page(file, title, _about(root), [Place("", root)], resume=True)]
    for name, field in root.model_fields.items():
        if not (places := list(_inside(field.annotation, name, is_free(field)))):
            continue
        every = [place for one in places for place in _below(one)]
        typed_entries = list(dict.fromkeys(place.path for place in every if place.tag and place.path.endswith(".NAME")))
        about = _about(places[0].section)
        rest = [place for place in every if not place.path.startswith(tuple(typed_entries))] if typed_entries else every
        pages.append(Page(f"{name}.md", f"`{name}`", about, rest, resume=True))
        for path in typed_entries:
            key = path.removesuffix(".NAME")
            entries = sorted((one for one in every if one.path.startswith(path)), key=lambda one: one.path != path)
            types = ", ".join(f"`{place.tag}`" for place in entries if place.path == path)
            about = (
                f"Entries of `{key}`, each under a name of your own (NAME below). An entry's `type` is one of {types}."
            )
            pages.append(Page(f"{key.rpartition('.')[2]}.md", f"`{key}`", about, entries, resume=True))
    return pages


def whole_page(root: type[Section], file: str, title: str) -> Page:
    """A YAML on one page."""
    return Page(file, title, _about(root), list(_below(Place("", root))))


def _page(page: Page, pages: list[Page]) -> str:
    parts = [NOTE + f"# {page.title}", page.about]
    for places in _by_section(page.places).values():
        first = places[0]
        if first.path and page.title != first.title:
            parts.append(f"## {first.title}")
            if _about(first.section) != page.about:
                parts.append(_about(first.section))
            if others := [title for title in dict.fromkeys(place.title for place in places) if title != first.title]:
                parts.append("Also at " + ", ".join(others) + ".")
        parts.append(_table(first, page, pages))
    return "\n\n".join(parts) + "\n"


def _by_section(places: list[Place]) -> Mapping[Any, list[Place]]:
    """Places that have the same keys, each section once."""
    found: dict[Any, list[Place]] = {}
    for place in places:
        found.setdefault((place.section, place.tag, place.free), []).append(place)
    return found


def _table(place: Place, page: Page, pages: list[Page]) -> str:
    head = ["key", "value", "default", *(["on resume"] if page.resume else []), "meaning"]
    rows = [head, ["---"] * len(head)]
    texts = setting_texts(place.section)
    for name, field in sorted(place.section.model_fields.items(), key=lambda item: item[0] != "type"):
        inner = list(_inside(field.annotation, "", False))
        required = field.is_required() or (name == "type" and place.tag is not None and not place.usual)
        cells = [f"`{name}`", _value(place, name, field, page, pages)]
        cells.append("required" if required else _default(field))
        if page.resume:
            cells.append("may change" if place.free or is_free(field) else "see its keys" if inner else "fixed")
        fallback = _first_sentence(_about(inner[0].section)) if len(inner) == 1 else ""
        rows.append([*cells, " ".join((texts.get(name) or fallback).split())])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _value(place: Place, name: str, field: FieldInfo, page: Page, pages: list[Page]) -> str:
    """Allowed values in words, with links to the sections that stand there."""
    if name == "type" and place.tag is not None:
        return f"`{place.tag}`"
    words = describe(constrained_type(field)).strip()
    words += " or null" if type(None) in get_args(field.annotation) and "null" not in words else ""
    words += "".join(f" that matches `{pattern}`" for pattern in _patterns(field))
    prefix = f"{place.path}.{name}" if place.path else name
    links = []
    for inner in _inside(field.annotation, prefix, False):
        label = inner.tag or "keys"
        links += [link for link in [_link(inner, label, page, pages)] if link and link not in links]
    return words + (f" ({', '.join(links)})" if links else "")


def _link(place: Place, label: str, page: Page, pages: list[Page]) -> str | None:
    for other in (page, *pages):
        if other.resume != page.resume or (not page.resume and other is not page):
            continue
        for places in _by_section(other.places).values():
            if any((one.path, one.section, one.tag) == (place.path, place.section, place.tag) for one in places):
                target = "" if other is page else other.file
                anchor = "" if other.title == places[0].title else f"#{anchor_of(places[0].title)}"
                return f"[{label}]({target}{anchor})" if target + anchor else None
    return None


def anchor_of(heading: str) -> str:
    """Anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _below(place: Place) -> Iterator[Place]:
    """A section and all sections in it, from the outside to the inside."""
    yield place
    for name, field in place.section.model_fields.items():
        path = f"{place.path}.{name}" if place.path else name
        for inner in _inside(field.annotation, path, place.free or is_free(field)):
            yield from _below(inner)


def _inside(annotation: Any, path: str, free: bool) -> Iterator[Place]:
    """Sections that a value of this type is made of. NAME stands for an entry's name, N for its number."""
    options = sections_by_type(annotation)
    for tag, section in options.items():
        yield Place(path, section, tag, free, tag == usual_type(annotation))
    for member in alternatives_of(annotation):
        if is_section(member) and not options:
            yield Place(path, member, None, free)
        elif get_origin(member) is dict:
            yield from _inside(get_args(member)[1], f"{path}.NAME", free)
        elif get_origin(member) is list:
            yield from _inside(get_args(member)[0], f"{path}.N", free)


def _patterns(field: FieldInfo) -> list[str]:
    return [part.pattern for part in field.metadata if getattr(part, "pattern", None)]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        given = {"type": getattr(value, "type", None)} if sections_by_type(field.annotation) else {}
        given |= value.model_dump(mode="json", exclude_defaults=True)
        return f"`{_written(given)}`" if given else "its keys' defaults"
    written = default_value(field)
    return "" if written is PydanticUndefined else f"`{_written(written)}`"


def _written(value: Any) -> str:
    """A value as it stands in YAML."""
    if isinstance(value, str) and re.fullmatch(r"[\w$][\w .%/{}$-]*", value):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _about(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


if __name__ == "__main__":
    main()
