"""What a run decides by itself: all of it is documented, described and written down."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.errors import UserError
from llmtrain.flops.peaks import device_by_short_name
from llmtrain.kernels.platform import named
from llmtrain.plan.describe import Description, describe
from llmtrain.schema.json_schema import json_schema
from llmtrain.schema.load import load_config

DOCS = Path(__file__).parents[3] / "docs"


def settings_with_auto(node: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of the settings of a JSON schema that may be `auto`."""
    if "$ref" in node:
        if not node["$ref"].endswith("Interpolation"):
            yield from settings_with_auto(schema["$defs"][node["$ref"].rpartition("/")[2]], schema, path)
        return
    if node.get("const") == "auto" or "auto" in node.get("enum", ()):
        yield path.removeprefix(".")
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in node.get(key, ()):
            yield from settings_with_auto(choice, schema, path)
    for name, entry in node.get("properties", {}).items():
        yield from settings_with_auto(entry, schema, f"{path}.{name}")
    if isinstance(more := node.get("additionalProperties"), dict):
        yield from settings_with_auto(more, schema, f"{path}.NAME")


def documented() -> tuple[set[str], set[str]]:
    """Settings of the tables of docs/auto.md: of those with auto, and of those with null."""
    with_auto, _, with_null = (DOCS / "auto.md").read_text().partition("whose default, `null`")
    first, second = (set(re.findall(r"^\| `([\w.]+)`", text, re.M)) for text in (with_auto, with_null))
    return first, second


def test_docs_list_every_setting_that_may_be_auto():
    schema = json_schema()
    assert set(settings_with_auto(schema, schema)) == documented()[0]


def described(gpu: str, world_size: int, *overrides: str, name: str = "zamba2-1.2b") -> Description:
    config = load_config(name, list(overrides), world_size=world_size)
    return describe(config, world_size, device_by_short_name(gpu))


def test_describe_shows_every_documented_setting():
    float8 = ["train.float8={}", "train.activation_checkpointing={type: auto}", "train.microbatch_size=auto"]
    found = described("h200", 8, *float8).decided
    found |= described("h200", 8, "train.parallel.tensor=2").decided
    found |= described("h200", 8, name="experts-350m").decided
    found |= described("h200", 1, name="quickstart-rl").decided
    shown = {re.sub(r"blocks\.\w+", "blocks.NAME", setting) for setting in found}
    with_auto, with_null = documented()
    assert with_auto | with_null == {
        name for name in shown if not name.endswith(("conv1d", "gated_norm", "rotary"))
    } | {
        "data.prepare.tokenizer_engine"  # which `prepare` decides
    }


def test_a_setting_that_is_given_is_none_of_the_decisions():
    found = described(
        "h200", 1, "train.loss.type=plain", "train.compile=off", "model.blocks.m.backend=reference"
    ).decided
    assert found.keys().isdisjoint({"train.loss.type", "train.compile", "model.blocks.m.backend"})


@pytest.mark.parametrize(("gpu", "arch"), [("h200", "sm90"), ("b300", "sm103"), ("l4", "sm89"), ("mi250x", "gfx90a")])
def test_the_architecture_of_a_gpu_that_is_not_here(gpu: str, arch: str):
    device = device_by_short_name(gpu)
    assert named(device.title, 1 << 30, device.compute_units).arch == arch
    with pytest.raises(UserError, match="not known"):
        named("NVIDIA GT 710", 1 << 30, 1)
