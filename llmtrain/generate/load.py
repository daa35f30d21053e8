"""Loading a model for generation from a run, a checkpoint, or a folder in Hugging Face format."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmtrain.adapt.base import adaptations, adapted
from llmtrain.adapt.peft_read import Adapters, attach, is_peft, read_peft
from llmtrain.adapt.stored_weights import store_in_8_bits
from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.repository import Repository
from llmtrain.config.addresses import is_remote
from llmtrain.config.base import Section
from llmtrain.config.decode import decode
from llmtrain.config.regular_file import read_bytes, read_json
from llmtrain.data.tokenize import stored_tokenizer
from llmtrain.data.tokenize.tokenizer import TextTokenizer, load_tokenizer
from llmtrain.errors import UserError
from llmtrain.kernels.platform import detect
from llmtrain.models.backends import servable
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.adapt import AdaptConfig, WeightFormat


def load_model(
    source: str,
    dtype: torch.dtype | None = None,
    tokenizer: TextTokenizer | None = None,
    device: torch.device | None = None,
    *,
    ema: bool = False,
    adapter: str | None = None,
    weights: WeightFormat | None = None,
) -> tuple[CausalLM, TextTokenizer]:
    """Load a model and its tokenizer.

    source: a run's folder (its newest complete checkpoint), a checkpoint, either also in a store (s3://bucket/prefix), or a
        folder or hub name in Hugging Face format.
    dtype: of weights and activations; default bf16 on a GPU, fp32 on a CPU. A_log, D and dt_bias stay fp32.
    tokenizer: in place of its own.
    device: default this process's GPU, or else its CPU.
    ema: the moving average of the weights, which a run with train.ema keeps.
    adapter: a folder of peft's, or a checkpoint of adapters alone, beside the model's weights.
    weights: format of linear layers' weights, once they are loaded; default `dtype`.
    Raises UserError when there is nothing to load there, no tokenizer with it, or one with more tokens than the model.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = detect(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    path = Path(source).expanduser()
    if not is_remote(source) and ((path / "config.json").is_file() or not path.exists()):
        from llmtrain.models.hf.hf_checkpoint import find_hf_folder
        from llmtrain.models.hf.load import load_hf

        folder = find_hf_folder(source)
        if ema:
            raise UserError(f"{folder} is no checkpoint of llmtrain, and has no moving average of the weights")
        model, own = load_hf(folder, here, dtype), folder
    else:

        def read(folder: Path, manifest: Manifest) -> tuple[HybridLM, TextTokenizer]:
            config, adapt = checkpoint_model_config(folder, manifest), checkpoint_adaptations(folder, manifest)
            with torch.device("meta"):
                model = HybridLM(servable(config, here, str(dtype).removeprefix("torch.")), platform=here, dtype=dtype)
                model = adapted(model, adapt)
            model.to_empty(device=device)
            save_load.load(folder, model, ema=ema)
            for converter in adaptations(adapt):
                converter.finish(model.cast(dtype), device)
            return model, tokenizer or checkpoint_tokenizer(folder, manifest)

        (model, tokenizer), own = Repository(source).read(read), None
    if adapter is not None:
        model = attach(model.to(device), _read_adapter(adapter, source, own, model.config, ema))
    if tokenizer is None:
        assert own is not None
        tokenizer = load_tokenizer(own)
    require_rows(source, tokenizer, model.config.vocab_size)
    made = CausalLM(model.cast(dtype)).to(device).eval()
    if weights is not None:
        store_in_8_bits(made.hybrid, weights, here)
    return made, tokenizer


def require_rows(source: str | Path, tokenizer: TextTokenizer, size: int) -> None:
    """Raises UserError for a tokenizer whose tokens have no rows among the `size` of a model's embedding."""
    if tokenizer.rows_needed > size:
        raise UserError(
            f"{source}: the tokenizer has {max(tokenizer.rows_needed, tokenizer.vocab_size)} tokens, the model {size}; name the "
            "one it was trained with as `tokenizer`"
        )


def _read_adapter(adapter: str, source: str, own: Path | None, config: ModelConfig, ema: bool) -> Adapters:
    """own: the folder in Hugging Face format that the base is. Raises UserError for adapters of another base."""
    path, base = Path(adapter).expanduser(), None if own else Repository(source).find().require()
    published = read_json(own / "config.json").get("model_type") if own else None
    if base is not None:
        published = base.config.get(manifests.PUBLISHED)
    found = (
        read_peft(path, config, published)
        if is_peft(path)
        else Repository(adapter).read(partial(_stored_adapter, ema=ema))
    )
    if found.base is not None and base is not None and base.save_id != found.base["save_id"]:
        raise UserError(
            f"{adapter} holds adapters of save {found.base['save_id']} ({found.base['address']}); {source} is another one "
            f"({base.save_id}). Give that one as the model"
        )
    return found


def _stored_adapter(folder: Path, manifest: Manifest, ema: bool) -> Adapters:
    adapt = checkpoint_adaptations(folder, manifest)
    if adapt is None or manifest.base is None:
        raise UserError(f"{folder} holds a whole model and no adapters alone; give it as the model")
    names = [
        name.removeprefix("model.") for name in indexes.read(folder, manifest).tensors if name.startswith("model.")
    ]
    shapes = {name: tuple(one.shape) for name, one in indexes.read(folder, manifest).tensors.items()}
    prefix = "ema." if ema else "model."
    state: dict[str, Any] = {f"{prefix}{name}": torch.empty(shapes[f"model.{name}"]) for name in names}
    save_load.load_state(save_load.stack_of(folder, manifest)[:1], state, verify=True)
    return Adapters(adapt, {name: state[f"{prefix}{name}"] for name in names}, manifest.base, {})


def checkpoint_model_config(folder: Path, manifest: Manifest) -> ModelConfig:
    """The `model` section of a checkpoint. Raises CheckpointError for settings that this version does not have."""
    return _decoded(ModelConfig, "model", folder, manifest)


def checkpoint_adaptations(folder: Path, manifest: Manifest) -> AdaptConfig | None:
    """The `adapt` section of a checkpoint. Raises CheckpointError for settings that this version does not have."""
    return _decoded(AdaptConfig, "adapt", folder, manifest) if manifest.config.get("adapt") else None


def _decoded(section: type[Section], name: str, folder: Path, manifest: Manifest) -> Any:
    config, problems = decode(section, manifest.config[name])
    if problems:
        unknown = "; ".join(f"{name}.{problem.path}: {problem.message}" for problem in problems)
        raise CheckpointError(f"{folder} holds a model of another version of llmtrain ({unknown})")
    return config


def checkpoint_tokenizer(folder: Path, manifest: Manifest) -> TextTokenizer:
    """A checkpoint's tokenizer: the one it was trained with, which it holds; else, of an import or an earlier version of
    llmtrain, in its own folder or beside its run's shards. Raises UserError if there is none."""
    if stored_tokenizer.NAME in manifest.files:
        manifests.verify(folder, manifest, names=[stored_tokenizer.NAME])
        file = folder / stored_tokenizer.NAME
        return stored_tokenizer.as_trained(stored_tokenizer.unpack(read_bytes(file), file), manifest.config["data"])
    if (folder / "tokenizer").is_dir():
        imported = stored_tokenizer.load_imported(folder / "tokenizer", manifest.config.get(stored_tokenizer.CHECKSUMS))
        return stored_tokenizer.as_trained(imported, manifest.config.get("data") or {})
    try:
        return stored_tokenizer.load_run_tokenizer(manifest.config["data"])
    except stored_tokenizer.NoTokenizerError as error:
        raise stored_tokenizer.NoTokenizerError(
            f"{folder} has no tokenizer ({error}); name one with --tokenizer, or in an evaluation with `tokenizer` beside its path"
        ) from None
