"""The `adapt` section of the YAML: changes to a model, such as adapters beside frozen weights. No torch here."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from llmtrain.config.base import Section


class AdaptationSection(Section):
    """Settings of one change to the model.

    implementation: "module:Class" of its Converter (adapt/base.py), imported when a model is built.
    """

    implementation: ClassVar[str]

    def load_implementation(self) -> Any:
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)


class AdaptConfig(Section):
    """Changes to the model, by name, in this order: parameters that are added, and those that are frozen. Checkpoints then hold
    what is trained, and name the checkpoint of init_from, where the frozen weights are. This version brings none of its own;
    docs/extending shows how one is added."""

    def sections(self) -> list[AdaptationSection]:
        return [section for name in type(self).model_fields if (section := getattr(self, name)) is not None]
