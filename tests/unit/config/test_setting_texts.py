"""Texts of settings, read from a section's source when they are asked for."""

from llmtrain.config.base import Section
from llmtrain.config.setting_texts import setting_texts


class Base(Section):
    rate: float = 1.0
    """Of what is
    kept."""
    size: int = 1
    """Of all."""
    plain: int = 0


class Derived(Base):
    size: int = 2
    name: str = "a"
    """A name."""


def test_a_setting_has_the_text_after_it_and_that_of_the_section_it_comes_from():
    assert setting_texts(Base) == {"rate": "Of what is\nkept.", "size": "Of all."}
    assert setting_texts(Derived) == {"rate": "Of what is\nkept.", "name": "A name."}


def test_the_schema_for_editors_has_them():
    settings = Derived.model_json_schema()["properties"]
    assert {name: entry.get("description") for name, entry in settings.items()} == {
        **dict.fromkeys(("size", "plain")),
        **setting_texts(Derived),
    }
