"""An evaluation YAML of LLM Foundry (of its `eval/eval.py`), or a list of its tasks, as one for `llmtrain eval`."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from llmtrain.convert.foundry.run import read_name
from llmtrain.convert.foundry.settings import Settings, note_unread
from llmtrain.convert.foundry.tasks import read_tasks

_DTYPES = {"fp32": "float32", "amp_bf16": "bfloat16", "amp_fp16": "float16"}
_GAUNTLET = (
    "averages over categories of other tasks; `gauntlet: core` or `gauntlet: seed` are those that are shipped here"
)
_LOADER = "losses over shards are logged while a model trains (data.validation); a task of type perplexity reads texts"
_LOADED = (
    "init_device",
    "pretrained",
    "use_auth_token",
    "trust_remote_code",
    "use_flash_attention_2",
    "device",
    "name",
)
"""Settings of a model by which LLM Foundry loads it, and that ours needs not."""


def read_evaluation(root: Settings, file: Path, known_tasks: Collection[str]) -> dict[str, Any]:
    """The sections of our YAML; what has no equal is noted. known_tasks: names of our tasks."""
    sections: dict[str, Any] = {"name": read_name(root, file.stem), "convention": "foundry"}
    entries = root.take("models", list, [])
    sections["models"] = [model for number, entry in enumerate(entries) if (model := _model(root, number, entry))]
    sections["tasks"] = read_tasks(root, file, known_tasks)
    sections["max_length"] = root.take("max_seq_len", int) or root.take("icl_seq_len", int)
    root.skip(
        "icl_seq_len", "seed", "device_eval_batch_size", "fsdp_config", "loggers", "python_log_level", "dist_timeout"
    )
    sections["dtype"] = _DTYPES.get(root.take("precision", str, ""))
    for key in ("eval_gauntlet", "eval_gauntlet_str"):
        if root.data.get(key):
            root.left(key, _GAUNTLET)
    for key in ("eval_loader", "eval_loaders"):
        if root.data.get(key):
            root.left(key, _LOADER)
    if root.data.get("eval_subset_num_batches", -1) not in (-1, None):
        root.left("eval_subset_num_batches", "`limit: N` takes the first N documents of every task")
    note_unread(root)
    return {key: value for key, value in sections.items() if value}


def _model(root: Settings, number: int, entry: Any) -> dict[str, Any] | None:
    """An entry of `models`; None where ours has no such model, with a note."""
    found = Settings(entry, root.notes, f"models.{number}")
    model, tokenizer = found.section("model"), found.section("tokenizer")
    kind, name = model.take("name", str, ""), found.take("model_name", str)
    path = found.take("load_path", str) or model.take("pretrained_model_name_or_path", str)
    if not path or kind not in ("hf_causal_lm", "mpt_causal_lm"):
        what = "is no model that ours can load" if kind else "names no model"
        found.left("model", f"{what}; name a run, a checkpoint or a folder in Hugging Face format in `models`")
        return None
    if "load_path" in found:
        found.left(
            "load_path",
            "a checkpoint of Composer is read once `llmtrain checkpoint convert --to llmtrain` has written it",
        )
    for key in model.data.keys() - {"pretrained_model_name_or_path", *_LOADED}:
        if kind == "hf_causal_lm" and model.data[key] not in (None, False, {}):
            model.left(key, "is not set here: a model is read as its folder has it (an adapter: merged into it first)")
    own = tokenizer.take("name", str)
    made = {"path": path, "name": name and name.rpartition("/")[2], "tokenizer": own if own != path else None}
    return {key: value for key, value in made.items() if value}
