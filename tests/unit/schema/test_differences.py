"""Settings that may change, and that must not, when a run is resumed."""

import copy
import json

import pytest

from llmtrain.schema.config import Config
from llmtrain.schema.differences import differences

WRITTEN = {
    "name": "tiny",
    "model": {
        "vocab_size": 512,
        "d_model": 128,
        "blocks": {
            "m": {"type": "mamba2", "dt_limit": [0.0, 1.0]},
            "a": {"type": "attention", "n_heads": 4, "position": {"type": "alibi"}},
        },
        "layers": "m a",
    },
    "data": {"train": {"streams": {"books": {"local": "books", "proportion": 1.0}}}},
    "train": {"duration": "300 steps", "global_batch_size": 64, "microbatch_size": 8},
    "optimizer": {"lr": 1e-3},
}


def config(**changes) -> Config:
    """WRITTEN with `model__d_model=256` meaning model.d_model: 256."""
    data = copy.deepcopy(WRITTEN)
    for path, value in changes.items():
        *sections, name = path.split("__")
        section = data
        for key in sections:
            section = section.setdefault(key, {})
        section[name] = value
    return Config.model_validate_json(json.dumps(data))


def stored(**changes) -> dict:
    return config(**changes).model_dump(mode="json")


def test_same_config_differs_in_nothing():
    assert differences(stored(), config()) == []


@pytest.mark.parametrize(
    "path,value,line",
    [
        ("model__d_model", 256, "model.d_model: 128 -> 256"),
        ("optimizer__betas", [0.9, 0.99], "optimizer.betas: [0.9, 0.95] -> [0.9, 0.99]"),
        (
            "optimizer__groups",
            [{"match": "*.A_log", "lr": 0.0}],
            'optimizer.groups: [] -> [{"match": "*.A_log", "lr": 0.0, "lr_factor": null, "weight_decay": null}]',
        ),
        ("schedule__warmup", "5 %", "schedule.warmup: 0 steps -> 5 %"),
        ("train__clip_grad_norm", None, "train.clip_grad_norm: 1.0 -> null"),
        ("train__loss__z_loss", 1e-4, "train.loss.z_loss: 0.0 -> 0.0001"),
        ("model__blocks__m__dt_limit", None, "model.blocks.m.dt_limit: [0.0, 1.0] -> null"),
        ("model__norm__eps", 1e-6, "model.norm.eps: 1e-05 -> 1e-06"),
        ("model__blocks__m__norm", {"eps": 1e-6}, "model.blocks.m.norm.eps: 1e-05 -> 1e-06"),
        ("model__blocks__a__position", {"type": "rotary"}, "model.blocks.a.position.type: alibi -> rotary"),
        ("data__mask_documents", True, "data.mask_documents: false -> true"),
        ("data__train__streams__books__proportion", 2.0, "data.train.streams.books.proportion: 1.0 -> 2.0"),
    ],
)
def test_change_of_meaning_is_one_line(path, value, line):
    assert differences(stored(), config(**{path: value})) == [line]


@pytest.mark.parametrize(
    "path,value",
    [
        ("name", "other"),
        ("train__duration", "600 steps"),
        ("train__microbatch_size", 4),
        ("train__sharding__strategy", "grad_op"),  # inside a section that is free
        ("train__loss__type", "chunked"),  # a free setting inside one that is not
        ("logging__interval", 7),
        ("eval__interval", "7 steps"),
        ("model__blocks__a__backend", "flex"),
        ("model__blocks__m__chunk_size", 64),
        ("model__norm__backend", "reference"),
        ("model__blocks__m__norm", {"backend": "reference"}),  # else as model.norm, which it was before
        ("data__train__streams__books__local", "/elsewhere/books"),
        ("data__num_workers", 0),
    ],
)
def test_change_of_means_is_free(path, value):
    assert differences(stored(), config(**{path: value})) == []


def test_a_blocks_own_norm_may_go_where_the_models_is_the_same():
    own = stored(model__blocks__m__norm={"eps": 1e-6})
    assert differences(own, config()) == ["model.blocks.m.norm.eps: 1e-06 -> 1e-05"]
    assert differences(own, config(model__norm__eps=1e-6)) == ["model.norm.eps: 1e-05 -> 1e-06"]


def test_each_mixer_of_a_block_is_compared_by_itself():
    mixers = [{"type": "mamba2"}, {"type": "attention", "n_heads": 4}]
    block = {"type": "parallel_mixers", "mixers": mixers}
    other = block | {"mixers": [{"type": "mamba2", "backend": "reference"}, {"type": "attention", "n_heads": 8}]}
    given = {"model__layers": "m a h"}
    found = differences(stored(model__blocks__h=block, **given), config(model__blocks__h=other, **given))
    assert found == ["model.blocks.h.mixers.1.n_heads: 4 -> 8"]


def test_block_that_came_or_went():
    more = {**WRITTEN["model"]["blocks"], "b": {"type": "attention", "n_heads": 2}}
    added = differences(stored(), config(model__blocks=more, model__layers="m a b"))
    assert added[0].startswith("model.blocks.b: (absent) -> {") and '"n_heads": 2' in added[0]
    assert added[1] == "model.layers: m a -> m a b"
    gone = differences(stored(model__blocks=more, model__layers="m a b"), config())
    assert gone[0].startswith("model.blocks.b: {") and '"n_heads": 2' in gone[0] and gone[0].endswith("-> (absent)")


def test_checkpoint_older_than_a_setting_counts_as_its_default():
    old = stored()
    del old["train"]["nonfinite"], old["model"]["norm"], old["model"]["blocks"]["a"]["qk_norm"]
    assert differences(old, config()) == []
    assert differences(old, config(train__nonfinite="skip")) == ["train.nonfinite: stop -> skip"]


def test_another_optimizer_does_not_hide_other_groups():
    old = stored()
    old["optimizer"] |= {
        "type": "muon",
        "groups": [{"match": "*.A_log", "lr": 0.0, "lr_factor": None, "weight_decay": None}],
    }
    found = differences(old, config())
    assert found[0] == "optimizer.type: muon -> adamw"
    assert len(found) == 2 and found[1].startswith("optimizer.groups: [{") and found[1].endswith("}] -> []")


def test_checkpoint_with_a_setting_that_no_longer_exists():
    old = stored()
    old["optimizer"]["amsgrad"] = True
    assert differences(old, config()) == ["optimizer.amsgrad: true -> (absent)"]
