"""LLM Foundry's finetuning loader as our `data.prepare` with chat records, and the objective on their trained tokens."""

from typing import Any

from llmtrain.config.addresses import may_be_hub_name
from llmtrain.config.base import Problem
from llmtrain.convert.foundry.settings import Settings

NAME = "finetuning"
_MAPS: dict[str, dict[str, Any]] = {
    "tatsu-lab/alpaca": {"format": "alpaca"},
    "HuggingFaceH4/databricks_dolly_15k": {"format": "alpaca", "fields": {"input": "context", "output": "response"}},
    "databricks/databricks-dolly-15k": {"format": "alpaca", "fields": {"input": "context", "output": "response"}},
    "bigscience/P3": {"fields": {"prompt": "inputs", "completion": "targets"}},
    "Muennighoff/P3": {"fields": {"prompt": "inputs", "completion": "targets"}},
    "Muennighoff/flan": {"fields": {"prompt": "inputs", "completion": "targets"}},
}
"""`chat` of data sets that LLM Foundry has a function of its own for, in lower case or not."""
_HARMLESS = {
    "allow_pad_trimming": "samples have one length",
    "pad_to_longest": "samples have one length",
    "safe_load": "files are never run",
    "max_leftover_bins_to_keep": "shards are packed before training, and nothing is dropped",
    "decoder_only_format": "every model here is a decoder",
    "predownload": "shards are made on this machine",
    "download_timeout": "shards are made on this machine",
    "download_retry": "shards are made on this machine",
}
_TARGETS = ("last", "all")


def is_finetuning(root: Settings) -> bool:
    """True for a file whose training data is prompts and responses, or messages."""
    return root.section("train_loader").data.get("name") == NAME


def read_finetuning(root: Settings, seq_len: int | None, validates: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Our `data` section, and comments on its keys. validates: false where the file turns validation off."""
    loader = root.section("train_loader")
    loader.skip("name")
    dataset = loader.section("dataset")
    tokenizer = root.section("tokenizer").take("name", str)
    if tokenizer is None:
        root.notes.problems.append(Problem("tokenizer.name", None, "is missing; records are prepared with it"))
    name, sources = _sources(dataset)
    chat = _chat(dataset, name)
    prepare: dict[str, Any] = {"sources": sources, "out": f"data/{_folder(name)}", "tokenizer": tokenizer}
    prepare |= {"seq_len": seq_len, "packing": _packing(dataset), "chat": chat}
    if not _validation(root, validates):
        prepare["validation_fraction"] = 0.0
    section: dict[str, Any] = {"seq_len": seq_len, "mask_documents": True, "prepare": prepare}
    section["shuffle"] = dataset.take("shuffle", bool, False)
    for key in ("shuffle_seed", "num_canonical_nodes"):
        if (value := dataset.take(key, int)) is not None:
            section[key] = value
    if (workers := loader.take("num_workers", int)) is not None:
        section["num_workers"] = workers
    for key, reason in _HARMLESS.items():
        if key in dataset.data:
            dataset.harmless(key, reason)
    if dataset.data.get("decoder_only_format") is False:
        what = "asks for an encoder and a decoder; llmtrain has decoders alone"
        dataset.notes.problems.append(Problem(dataset.at("decoder_only_format"), False, what))
    root.section("model").section("attn_config").skip("attn_uses_sequence_id")  # documents are always kept apart
    return section, {"prepare": "records are recognised by their fields; `llmtrain data show` shows what is trained"}


def _sources(dataset: Settings) -> tuple[str, list[str]]:
    """Name of the data, and our sources: of a folder or a data set of the hub, the files of the split."""
    name, split = dataset.take("hf_name", str), dataset.take("split", str, "train")
    kwargs = dataset.section("hf_kwargs")
    files = kwargs.take("data_files", (str, list, dict))
    folder = kwargs.take("data_dir", str)
    for key in kwargs.data.keys() - {"data_files", "data_dir"}:
        kwargs.left(key, "is an argument of `datasets.load_dataset`; name the files as data.prepare.sources")
    if name is None:
        given = next((key for key in ("streams", "remote", "local") if key in dataset), "hf_name")
        what = "holds shards of records; give data.prepare.sources the records that they were made from (JSON lines, Parquet)"
        missing = "is missing; it names the records"
        text = missing if given == "hf_name" else what
        dataset.notes.problems.append(Problem(dataset.at(given), dataset.data.get(given), text))
        return "chat", []
    if name in ("json", "parquet", "csv") and files:
        root = ""
    else:
        root = f"hf://datasets/{name}/" if may_be_hub_name(name) else f"{name.rstrip('/')}/"
        root += f"{folder.strip('/')}/" if folder else ""
    if isinstance(files, dict):
        files = files.get(split)
    if files:
        return name, [f"{root}{file}" for file in ([files] if isinstance(files, str) else files)]
    dataset.left("split", f"the files of the split are taken by their names, as data.prepare.sources: {split}*")
    return name, [f"{root}**/{split}*"]


def _chat(dataset: Settings, name: str) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    known = {key.lower(): value for key, value in _MAPS.items()}.get(name.lower())
    given = dataset.take("preprocessing_fn", (str, dict))
    if isinstance(given, dict):
        chat["fields"] = {"completion" if ours == "response" else ours: theirs for ours, theirs in given.items()}
    elif known is not None:
        chat |= known
        if given is not None or known.get("format"):
            text = "prompts are the records' texts in the chat template, not in LLM Foundry's own words"
            dataset.left("preprocessing_fn", text)
    elif given is not None:
        what = (
            "is a function of Python, which llmtrain does not run; write what it makes of each record to a file of JSON lines and "
            "name that as data.prepare.sources, or give a mapping of fields such as {prompt: question, response: answer}"
        )
        dataset.notes.problems.append(Problem(dataset.at("preprocessing_fn"), given, what))
    targets = dataset.take("target_responses", str, "last")
    if targets.lower() not in _TARGETS:
        what = f"expected {' or '.join(_TARGETS)}"
        dataset.notes.problems.append(Problem(dataset.at("target_responses"), targets, what))
    prompts = dataset.take("target_prompts", str, "none").lower().replace(" ", "")
    number = prompts.removeprefix("length>=")
    if prompts not in ("none", "all") and (number == prompts or not number.isdecimal()):
        what = "expected none, all or length>=N"
        dataset.notes.problems.append(Problem(dataset.at("target_prompts"), prompts, what))
    return chat | {"targets": targets.lower()} | ({"prompts": prompts} if prompts != "none" else {})


def _packing(dataset: Settings) -> str:
    ratio = dataset.take("packing_ratio", (int, float, str))
    if isinstance(ratio, str) and ratio != "auto":
        what = "expected a number or auto"
        dataset.notes.problems.append(Problem(dataset.at("packing_ratio"), ratio, what))
    if ratio is None or ratio == 1:
        return "padded"
    dataset.harmless(
        "packing_ratio", "samples are filled as far as conversations fit, before training; none is left over"
    )
    return "best_fit"


def _validation(root: Settings, validates: bool) -> bool:
    """True where the file has validation data, which it then notes as held out of the training records."""
    key = "eval_loaders" if "eval_loaders" in root else "eval_loader"
    if key not in root:
        return False
    if not validates:
        root.harmless(key, "eval_interval: 0 turns validation off")
        return False
    root.left(
        key,
        "validation is a part of the training records, data.prepare.validation_fraction; `llmtrain prepare` makes shards of other "
        "records, to name as data.validation.streams",
    )
    return True


def _folder(name: str) -> str:
    return (
        "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name.strip("./")).strip("_")
        or "chat"
    )
