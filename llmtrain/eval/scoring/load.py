"""Finding and loading the model that a user names, and its identity, by which stored responses are found again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.checkpoint.beneath import open_stack
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.repository import Repository
from llmtrain.config.addresses import is_remote
from llmtrain.config.regular_file import read_json
from llmtrain.data.tokenize.tokenizer import TextTokenizer, end_ids, load_tokenizer, read_generation_config
from llmtrain.eval.errors import EvalError, prefixed
from llmtrain.schema.adapt import WeightFormat

if TYPE_CHECKING:
    import torch

    from llmtrain.eval.scoring.scorer import Scorer

Backend = Literal["auto", "llmtrain", "transformers"]
_WEIGHTS = ("*.safetensors", "*.bin", "*.json")


@dataclass(frozen=True)
class FoundModel:
    """Model that is found but not loaded.

    folder: a checkpoint, or a folder in Hugging Face format. native: read by llmtrain's own model, not by transformers. identity:
    digest of names, sizes and times of the files of weights and config. ema: the moving average of the weights is meant.
    """

    folder: Path
    is_checkpoint: bool
    native: bool
    identity: str
    ema: bool = False
    adapter: str | None = None
    """A folder of peft's, or a checkpoint of adapters alone, beside it."""


def find_model(source: str, backend: Backend = "auto", ema: bool = False, adapter: str | None = None) -> FoundModel:
    """Find a model without loading it.

    source: a run's folder (its newest complete checkpoint), a checkpoint, either also in a store (s3://bucket/prefix, of
        which a copy is made here), or a folder or hub name in Hugging Face format.
    ema: the moving average of a checkpoint's weights.
    Raises UserError when there is none, or the backend cannot read it."""
    from llmtrain.models.hf.hf_checkpoint import find_hf_folder

    path = Path(source).expanduser()
    is_checkpoint = is_remote(source) or (path.exists() and not (path / "config.json").is_file())
    if is_checkpoint:
        folder, manifest = Repository(source).open()
        if backend == "transformers":
            raise EvalError(
                f"{folder} is a checkpoint of llmtrain, which transformers cannot read; `llmtrain export` it"
            )
        stack = open_stack(folder, manifest)  # raises if the checkpoint beneath is not there
        if ema:
            indexes.require_average(folder, stack[0].index)
    else:
        folder = Path(find_hf_folder(source))
        if ema:
            raise EvalError(
                f"{folder} is no checkpoint of llmtrain, and has no moving average of the weights; set ema: false"
            )
    native = backend != "transformers"
    if native and not is_checkpoint:
        reason = _unsupported_reason(folder)
        if reason and backend == "llmtrain":
            raise EvalError(f"{folder}: {reason}; use backend: transformers")
        native = reason is None
    identity = _digest([_identity(folder), "ema"]) if ema else _identity(folder)
    if adapter is not None:
        if not native:
            raise EvalError(
                f"{adapter}: adapters are read beside llmtrain's own models; merge them with peft for transformers'"
            )
        beside = Path(adapter).expanduser()
        if not (beside / "adapter_config.json").is_file():
            beside = Repository(adapter).open()[0]
        adapter, identity = str(beside), _digest([identity, _identity(beside)])
    return FoundModel(folder, is_checkpoint, native, identity, ema, adapter)


def window_of(found: FoundModel) -> int:
    """Longest input by the model's config: max_seq_len, or what transformers calls it.

    Raises EvalError when the config has no such key.
    """
    if found.is_checkpoint:
        return Repository(found.folder).open()[1].config["model"]["max_seq_len"]
    if found.native:
        from llmtrain.models.config import ModelConfig
        from llmtrain.models.hf.family import family_of_hf_config

        config = read_json(found.folder / "config.json")
        return ModelConfig.model_validate(family_of_hf_config(config).read_config(config)).max_seq_len
    from llmtrain.eval.scoring.huggingface import window_of_config

    return window_of_config(found.folder)


def find_tokenizer(found: FoundModel, tokenizer: str | None = None) -> TextTokenizer:
    """Tokenizer of that name, or else the model's own."""
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    if not found.is_checkpoint:
        return load_tokenizer(found.folder)
    from llmtrain.generate.load import checkpoint_tokenizer

    folder, manifest = Repository(found.folder).open()
    if not (folder / "tokenizer").is_dir() and "data" not in manifest.config:
        raise EvalError(f"{folder} was imported without a tokenizer; import it from a folder that has one")
    return checkpoint_tokenizer(folder, manifest)


def load_scorer(
    found: FoundModel,
    tokenizer: TextTokenizer,
    *,
    dtype: str | None = None,
    max_length: int | None = None,
    max_batch_tokens: int | None = None,
    share_prefixes: bool = True,
    device: torch.device | None = None,
    weights: WeightFormat | None = None,
) -> Scorer:
    """Load the model. dtype: default bfloat16 on a GPU, float32 on a CPU. device: default this process's GPU, or the CPU.
    weights: as `load_model`'s, of llmtrain's own model.

    Raises UserError for weights that do not fit their config, for a max_length beyond learned positions, and for a
    tokenizer with more tokens than the model.
    """
    import torch

    from llmtrain.generate.load import load_model, require_rows

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind: torch.dtype = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    options: dict[str, Any] = {"max_length": max_length, "max_batch_tokens": max_batch_tokens}
    options["end_ids"] = tokenizer.end_ids if found.is_checkpoint else end_ids(read_generation_config(found.folder))
    if not found.native:
        if max_length and max_length > (longest := window_of(found)):
            raise EvalError(f"{found.folder}: by its config it reads {longest} tokens; max_length is {max_length}")
        from llmtrain.eval.scoring.huggingface import HuggingFaceScorer, load_huggingface

        model = load_huggingface(found.folder, kind, device)
        scorer = HuggingFaceScorer(model, tokenizer, share=share_prefixes, **options)
        require_rows(found.folder, tokenizer, scorer.vocab_size)
        return scorer
    from llmtrain.eval.scoring.scorer import HybridScorer

    beside: dict[str, Any] = {"ema": found.ema, "adapter": found.adapter, "weights": weights}
    model, _ = load_model(str(found.folder), kind, tokenizer, device, **beside)
    if max_length and model.hybrid.positions is not None and max_length > model.config.max_seq_len:
        raise EvalError(
            f"{found.folder} has learned positions for {model.config.max_seq_len} tokens; max_length is {max_length}"
        )
    return HybridScorer(model, tokenizer, share=share_prefixes, **options)


def default_dtype() -> str:
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def tokenizer_identity(tokenizer: TextTokenizer) -> str:
    """Digest of the tokenizer's vocabulary and of its special tokens' settings."""
    return _digest([tokenizer.backend.to_str(), tokenizer.config])


def _unsupported_reason(folder: Path) -> str | None:
    """Reason why llmtrain's own model cannot read this folder; None if it can."""
    from llmtrain.models.hf.family import UnsupportedModelError, family_of_hf_config

    with prefixed(f"{folder / 'config.json'} cannot be read", OSError, ValueError):
        config = read_json(folder / "config.json")
    try:
        family_of_hf_config(config).read_config(config)
    except UnsupportedModelError as error:
        return str(error).replace("\n", "; ")
    return None


def _identity(folder: Path) -> str:
    files = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return _digest([str(folder.resolve()), stats])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
