"""The `adapt` section of the YAML: changes to a model, such as adapters beside frozen weights. No torch here."""

from __future__ import annotations

from llmtrain.config.base import Section
from llmtrain.models.sections.feed_forward import ImplementedSection


class AdaptationSection(ImplementedSection):
    """Settings of one change to the model. implementation: of its Converter (adapt/base.py)."""


class AdaptConfig(Section):
    """Changes to the model, by name, in this order: parameters that are added, and those that are frozen. Checkpoints then hold
    what is trained, and name the checkpoint of init_from, where the frozen weights are. This version brings none of its own;
    docs/extending shows how one is added."""

    def sections(self) -> list[AdaptationSection]:
        return [section for name in type(self).model_fields if (section := getattr(self, name)) is not None]
