"""The JSON schema for editors, and the YAMLs that name it."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from llmtrain.config.yaml_source import Loader
from llmtrain.schema.json_schema import json_schema
from llmtrain.schema.load import load_config

YAMLS = Path(__file__).parents[3] / "yamls"
SCHEMA = YAMLS / "schema.json"
SHIPPED = sorted(YAMLS.rglob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema())


def errors(validator, text: str) -> list[str]:
    return [error.json_path for error in validator.iter_errors(yaml.load(text, Loader))]


BASE = """
name: x
model:
  vocab_size: 10
  d_model: ${data.seq_len}
  blocks: {m: {type: mamba2, d_state: 16}}
  layers: m
data: {seq_len: 16}
train: {duration: 3 steps, global_batch_size: 1, microbatch_size: 1}
optimizer: {lr: 0.1, betas: ["${oc.env:BETA}", 0.9]}
"""


def test_schema_is_valid_draft_2020_12():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)


def test_interpolations_pass_where_numbers_are_expected(validator):
    assert errors(validator, BASE) == []


@pytest.mark.parametrize(
    "right,wrong,path",
    [
        ("vocab_size: 10", "vocab_size: ten", "$.model.vocab_size"),
        ("vocab_size: 10", "vocab_size: 0", "$.model.vocab_size"),
        ("d_state", "d_stat", "$.model.blocks.m"),
        ("type: mamba2", "type: mambo2", "$.model.blocks.m"),
        ("type: mamba2, ", "", "$.model.blocks.m"),
        ("3 steps", "3", "$.train.duration"),
        ("name: x", "nam: x", "$"),
    ],
)
def test_mistakes_are_marked_where_they_are(validator, right, wrong, path):
    assert path in errors(validator, BASE.replace(right, wrong))


def test_each_block_type_is_a_constant_that_editors_can_offer():
    schema = json_schema()
    choices = [
        choice["$ref"].rpartition("/")[2]
        for choice in schema["$defs"]["ModelConfig"]["properties"]["blocks"]["additionalProperties"]["oneOf"]
    ]
    offered = [schema["$defs"][choice]["properties"]["type"]["const"] for choice in choices]
    assert offered == [
        *("attention", "compressed_attention", "gated_deltanet", "kimi_delta", "latent_attention", "mamba2", "mamba3"),
        *("parallel_mixers", "shared_attention"),
    ]


def test_settings_carry_their_documentation():
    d_conv = json_schema()["$defs"]["Mamba2Block"]["properties"]["d_conv"]
    assert d_conv["description"] == "Kernel width of the causal depthwise convolution."
    assert d_conv["default"] == 4


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(YAMLS)))
def test_shipped_yaml_parses_and_completes_in_editors(path, validator):
    first, _, text = path.read_text(encoding="utf-8").partition("\n")
    prefix = "# yaml-language-server: $schema="
    assert first.startswith(prefix)
    assert (path.parent / first.removeprefix(prefix)).resolve() == SCHEMA.resolve()
    assert errors(validator, text) == []
    load_config(path)
