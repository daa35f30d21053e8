"""The rest of LLM Foundry's YAML: batches, precision, FSDP, evaluation, checkpoints and loggers, as ours."""

import re
from typing import Any

from llmtrain.config.addresses import address_problem, is_remote
from llmtrain.config.base import Problem
from llmtrain.convert.foundry.optimization import Length, read_clipping, take_duration
from llmtrain.convert.foundry.settings import Settings
from llmtrain.convert.foundry.source import RUN_NAME


def read_name(root: Settings, stem: str) -> str:
    """Our `name`; for a blank one, what LLM Foundry does, with the file's name in reserve."""
    found = root.take("run_name", str, RUN_NAME)
    if found == RUN_NAME:
        return f"${{oc.env:RUN_NAME,{_plain_name(stem)}}}"
    if found.startswith("${oc.env:"):
        return found
    name = _plain_name(found)
    if name != found:
        root.harmless("run_name", f"names have letters, digits, '.', '_' and '-'; {name} is written")
    return name


def _plain_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-_") or "run"


def read_length(root: Settings, seq_len: int | None) -> Length:
    batch = root.take("global_train_batch_size", int)
    if "global_train_batch_size" not in root:
        root.left("global_train_batch_size", "is missing; write the sequences of a step, on all ranks together")
    if "max_duration" not in root:
        root.notes.problems.append(Problem("max_duration", None, "is missing"))
    total = take_duration(root, "max_duration", batch)
    return Length(total, batch, batch * seq_len if batch and seq_len else None)


def read_train(root: Settings, length: Length) -> tuple[dict[str, Any], dict[str, str]]:
    """Our `train` section, and comments on its keys."""
    microbatch, comments = _microbatch(root, length.batch)
    section: dict[str, Any] = {
        "duration": str(length.total) if length.total else "???",
        "global_batch_size": length.batch or "???",
        "microbatch_size": microbatch,
        "precision": _precision(root),
        "clip_grad_norm": read_clipping(root),
    }
    if z_loss := root.section("model").take("z_loss", float, 0.0):
        section["loss"] = {"z_loss": z_loss}
    fsdp = root.section("fsdp_config")
    if fsdp.take("activation_checkpointing", bool, False):
        section["activation_checkpointing"] = {"type": "full"}
    if fsdp.data:
        section["sharding"] = _sharding(fsdp)
    return section, comments


def _microbatch(root: Settings, batch: int | None) -> tuple[int | str, dict[str, str]]:
    key = "device_train_microbatch_size"
    found = root.take(key, (int, float, str), "auto")
    if found == "auto":
        root.harmless(key, "auto is written: a run tries sizes when it starts, once")
        return "auto", {}
    if not isinstance(found, (int, float)) or found < 1:
        root.harmless(key, "1 is written; raise it as far as memory goes, which `llmtrain describe` predicts")
        return 1, {"microbatch_size": "as large as memory allows: see `llmtrain describe`"}
    size = min(int(found), batch or int(found))
    while batch and batch % size:
        size -= 1
    if size != found:
        root.harmless(key, f"must divide the batch of {batch}; {size} is written")
    return size, {}


def _precision(root: Settings) -> str:
    found = root.take("precision", str, "amp_bf16")
    if found in ("fp32", "amp_bf16"):
        return found
    root.left("precision", "precision is fp32 or amp_bf16; amp_bf16 is written")
    return "amp_bf16"


def _sharding(fsdp: Settings) -> dict[str, Any]:
    found, degree = fsdp.take("sharding_strategy", str, "FULL_SHARD"), fsdp.take("data_parallel_shard_degree", int, -1)
    strategy = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "grad_op", "HYBRID_SHARD": "hybrid"}.get(found.upper())
    if found.upper() == "NO_SHARD":
        return {"strategy": "hybrid", "shard_size": 1}
    if strategy is None:
        strategy = "hybrid" if "HYBRID" in found.upper() else "full"
        fsdp.harmless(
            "sharding_strategy", f"sharding has the strategies full, grad_op and hybrid; {strategy} is written"
        )
    return {"strategy": "hybrid", "shard_size": degree} if degree > 0 else {"strategy": strategy}


def eval_interval(root: Settings, length: Length) -> str | None:
    """Our interval of validations; None where the file turns them off."""
    found = root.take("eval_interval", (str, int, float), 1)
    if found == 0 or (isinstance(found, str) and re.match(r"0+[a-z]", found)):
        return None
    interval = take_duration(root, "eval_interval", length.batch, "1ep")
    return str(interval) if interval else None


def read_eval(root: Settings, interval: str | None, validation: bool, tasks: bool) -> dict[str, Any]:
    """Our `eval` section."""
    microbatch = root.take("device_eval_batch_size", (int, float))
    batches = root.take("eval_subset_num_batches", int, -1)
    if interval is None or not validation:
        if not tasks:
            for key in ("eval_interval", "device_eval_batch_size", "eval_subset_num_batches"):
                if key in root and not (key == "eval_interval" and interval is None):
                    root.harmless(key, "there is nothing to validate on")
        return {}
    section: dict[str, Any] = {"interval": interval}
    if isinstance(microbatch, (int, float)) and microbatch >= 1:
        section["microbatch_size"] = int(microbatch)
    if batches > 0:
        section["max_samples"] = batches * max(int(microbatch or 1), 1)
        root.harmless("eval_subset_num_batches", "counted there on every rank; max_samples counts all ranks together")
    return section


def read_checkpoint(root: Settings, length: Length) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our `run_dir`, where the file has a folder here, and our `checkpoint` section."""
    top: dict[str, Any] = {}
    section: dict[str, Any] = {}
    interval = take_duration(root, "save_interval", length.batch)
    if interval is not None:
        section["interval"] = str(interval)
    keep = root.take("save_num_checkpoints_to_keep", int)
    folder = root.take("save_folder", str)
    if folder:
        place = folder.replace(RUN_NAME, "${name}").rstrip("/")
        if re.search(r"(?<!\$)\{", place):
            root.left("save_folder", "of the names in braces only {run_name} is known; replace the others")
        if not is_remote(place) and not re.match(r"[a-z0-9]+:", place):
            top["run_dir"] = re.sub(r"(?<=.)/checkpoints$", "", place)
        elif problem := address_problem(place):
            root.left("save_folder", f"checkpoints go to runs/${{name}}; checkpoint.remote {problem}")
        else:
            section["remote"] = place
        if keep is None:
            keep = -1
    else:
        root.harmless("save_folder", "without it nothing was saved; every run saves here, in runs/NAME")
    if keep is not None and keep > 0 and "remote" in section:
        text = "counts the copies here; keep_last counts those in the store too, so null, all of them, is written"
        root.left("save_num_checkpoints_to_keep", text)
        keep = -1
    if keep is not None:
        section["keep_last"] = keep if keep > 0 else None if keep < 0 else 1
        if keep == 0:
            root.harmless("save_num_checkpoints_to_keep", "the newest is always kept")
    return top, section


def read_logging(root: Settings) -> dict[str, Any]:
    """Our `logging` section."""
    section: dict[str, Any] = {}
    interval = root.take("console_log_interval", (str, int), "1ba")
    if isinstance(interval, str) and (match := re.fullmatch(r"([0-9]+)ba", interval)) and int(match[1]):
        if int(match[1]) != 1:
            section["interval"] = int(match[1])
    else:
        root.left("console_log_interval", "metrics are logged every so many steps; 1 is written")
    if (bar := root.take("progress_bar", bool)) is not None:
        section["progress_bar"] = bar
    loggers = root.section("loggers")
    if "tensorboard" in loggers.data:
        loggers.take("tensorboard", dict)
        section["tensorboard"] = True
    if "wandb" in loggers.data:
        wandb = loggers.section("wandb")
        made = {key: wandb.take(key, str) for key in ("project", "entity", "group")}
        section["wandb"] = {key: value for key, value in made.items() if value is not None}
        if tags := wandb.take("tags", list):
            section["wandb"]["tags"] = [str(tag) for tag in tags]
        if "name" in wandb:
            wandb.harmless("name", "runs are called as `name` says")
    return section
