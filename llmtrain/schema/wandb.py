"""The `wandb` section of a training and of an eval YAML, and Weights & Biases without an API key. No torch here."""

import os
from pathlib import Path

from llmtrain.config.base import Section, free
from llmtrain.config.texts import WandbName, WandbTag


class WandbConfig(Section):
    """Weights & Biases; runs offline, into the run's folder, when there is no API key."""

    project: WandbName = free("llmtrain")
    """Project on Weights & Biases."""
    entity: WandbName | None = free(None)
    """Team or user. Default: the user's own."""
    group: WandbName | None = free(None)
    """Group of runs to show this one with."""
    tags: list[WandbTag] = free(list)
    """Labels of the run."""


def go_offline_without_key() -> None:
    """Sets WANDB_MODE=offline (`wandb sync` sends the run later) where there is no API key and no mode was chosen."""
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    in_netrc = netrc.is_file() and "wandb" in netrc.read_text(errors="replace")
    if not os.environ.get("WANDB_API_KEY") and not in_netrc:
        os.environ.setdefault("WANDB_MODE", "offline")
