"""LLM Foundry's loaders as our `data` section."""

import re
from typing import Any

from llmtrain.config.base import Problem
from llmtrain.convert.foundry.settings import Settings


def read_seq_len(root: Settings) -> int | None:
    """Tokens of a sequence: the loader's, or the file's."""
    whole = root.take("max_seq_len", int)
    loader = root.section("train_loader").section("dataset").take("max_seq_len", int)
    if whole and loader and whole != loader:
        root.harmless("max_seq_len", f"the loader's own, {loader}, comes first")
    if not (whole or loader):
        root.notes.problems.append(Problem("max_seq_len", None, "is missing"))
    return loader or whole


def read_data(root: Settings, seq_len: int | None, validates: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Our `data` section, and comments on its keys. validates: false where the file turns validation off."""
    loader = root.section("train_loader")
    _refuse_other_loaders(loader)
    dataset = loader.section("dataset")
    section: dict[str, Any] = {"seq_len": seq_len, "train": {"streams": _streams(dataset, seq_len)}}
    streams: dict[str, Any] = {}
    for label, evaluated in _eval_loaders(root):
        _refuse_other_loaders(evaluated)
        below = evaluated.section("dataset")
        if (own := below.take("max_seq_len", int, seq_len)) != seq_len:
            below.left("max_seq_len", f"validation has sequences of data.seq_len, {seq_len}, not {own}")
        for name, stream in _streams(below).items():
            streams[_unused(f"{label}_{name}" if label else name, streams)] = stream
        for key in ("shuffle", "shuffle_seed", "shuffle_block_size", "num_canonical_nodes", "predownload"):
            below.take(key, (bool, int))
        evaluated.take("num_workers", int)
    if streams and validates:
        section["validation"] = {"streams": streams}
    elif streams:
        root.harmless("eval_loader", "eval_interval: 0 turns validation off")
    if root.section("model").section("attn_config").take("attn_uses_sequence_id", bool, False):
        section["mask_documents"] = True
        text = "documents are kept apart; besides, no document's first token is predicted from the one before, and learned "
        root.section("model").section("attn_config").left(
            "attn_uses_sequence_id", text + "positions begin anew at each"
        )
    section["shuffle"] = dataset.take("shuffle", bool, False)
    for key in ("shuffle_seed", "shuffle_block_size", "num_canonical_nodes", "predownload"):
        if (value := dataset.take(key, int)) is not None:
            section[key] = value
    if (workers := loader.take("num_workers", int)) is not None:
        section["num_workers"] = workers
    tokenizer = root.section("tokenizer").take("name", str)
    return section, {"train": f"tokenized with {tokenizer}" if tokenizer else ""}


def _refuse_other_loaders(loader: Settings) -> None:
    if (name := loader.take("name", str, "text")) != "text":
        what = "is no loader that llmtrain has; text reads shards of tokens, finetuning prompts and responses"
        loader.notes.problems.append(Problem(loader.at("name"), name, what))


def _eval_loaders(root: Settings) -> list[tuple[str, Settings]]:
    """Label and settings of each evaluation loader."""
    key = "eval_loaders" if "eval_loaders" in root else "eval_loader"
    if not isinstance(root.data.get(key), list):
        loader = root.section(key)
        loader.take("label", str)
        return [("", loader)] if loader.data else []
    loaders = []
    for i, data in enumerate(root.take(key, list)):
        loader = Settings(data if isinstance(data, dict) else {}, root.notes, f"{key}.{i}")
        loaders.append((_name(str(loader.take("label", str, str(i)))), loader))
        root.adopt(loader)
    if len(loaders) > 1:
        root.left(key, "validation has one loss, over the streams of all loaders together")
    return loaders


def _streams(dataset: Settings, seq_len: int | None = None) -> dict[str, dict[str, Any]]:
    """Our streams, of either form: `streams`, or one local, remote and split. seq_len: of training, whose streams may have
    `repeat` and `choose`."""
    given = dataset.take("streams", dict)
    common = {key: dataset.take(key, str) for key in ("local", "remote", "split")}
    if not given:
        return {_stream_name(common): _stream(common)}
    streams: dict[str, dict[str, Any]] = {}
    proportions = {
        n for n, stream in given.items() if isinstance(stream, dict) and stream.get("proportion") is not None
    }
    for name, data in given.items():
        stream = Settings(data or {}, dataset.notes, f"{dataset.at('streams')}.{name}")
        dataset.adopt(stream)
        values = {"local": stream.take("local", str), "remote": stream.take("remote", str)}
        values["split"] = stream.take("split", str, common["split"])
        made = _stream(values, name)
        if (proportion := stream.take("proportion", float)) is not None:
            made["proportion"] = proportion
        if seq_len is None:
            for key in filter(stream.__contains__, ("repeat", "choose")):
                stream.left(key, "validation reads every sample of its streams once")
        elif (repeat := stream.take("repeat", float)) is not None:
            made["repeats"] = repeat
        elif (choose := stream.take("choose", int)) is not None:
            made["tokens"] = choose * seq_len
        streams[_unused(_name(name), streams)] = made
    if proportions and len(proportions) != len(given):
        dataset.left("streams", "a proportion must be given to every stream or to none")
    return streams


def _stream(values: dict[str, Any], name: str = "") -> dict[str, Any]:
    local = values["local"] or f"data/{_name(name) if name else _stream_name(values)}"
    stream = {"local": local, "remote": values["remote"], "split": values["split"]}
    return {key: value for key, value in stream.items() if value is not None}


def _stream_name(values: dict[str, Any]) -> str:
    return _name(str(values["local"] or values["remote"] or "text").rstrip("/").rpartition("/")[2])


def _name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_") or "text"


def _unused(name: str, taken: dict[str, Any]) -> str:
    while name in taken:
        name += "_"
    return name
