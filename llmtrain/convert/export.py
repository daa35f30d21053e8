"""Export of a checkpoint to a folder that `transformers` loads, without remote code and without llmtrain."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.adapt.base import Converter, converters_of
from llmtrain.adapt.lora import Lora
from llmtrain.adapt.peft_folder import write_json, write_peft
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.format.tensor_file import Entry, TensorFile, split_into_files
from llmtrain.checkpoint.repository import Repository
from llmtrain.config.output_folder import atomic_folder, refuse_existing, require_space
from llmtrain.convert.checkpoint_tensors import CheckpointTensors
from llmtrain.convert.tensor_reader import TensorReader
from llmtrain.data.tokenize.tokenizer import TextTokenizer, load_tokenizer
from llmtrain.errors import UserError, first_few
from llmtrain.generate.load import checkpoint_adaptations, checkpoint_model_config, checkpoint_tokenizer
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Family, Weight, family_for_model
from llmtrain.progress import ByteBar


class CheckpointWeights(TensorReader):
    """Weights, or with `ema` the averages of those that were trained. Where changes added something beneath a module, its weights
    are merged when they are read: a module is in memory at a time.

    converters: the changes, in order, after they were made to a model. plain: shapes of the parameters after a merge, by name.
    Raises CheckpointError for a checkpoint without averages.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        plain: Mapping[str, tuple[int, ...]],
        converters: Sequence[Converter],
        ema: bool,
    ):
        self._tensors, self._converters = CheckpointTensors(folder, manifest), converters
        if ema:
            indexes.require_average(folder, self._tensors.stack[0].index)
        # Under averages also what has none: weights that were not trained, and states of layers.
        prefixes = ("model.", "ema.") if ema else ("model.",)
        self._stored = {name.removeprefix(prefix): name for prefix in prefixes for name in self._tensors.names(prefix)}
        modules, self._parts = {_module(name) for name in plain}, dict[str, list[str]]()
        for name in self._stored if converters else ():
            module = next((found for one in converters if (found := one.module_of(name))), _module(name))
            while module and module not in modules:
                module = _module(module)
            self._parts.setdefault(module, []).append(name)
        kept = {name for name, shape in plain.items() if self._tensors.shape(self._stored.get(name, name)) == shape}
        self._parts = {module: parts for module, parts in self._parts.items() if not set(parts) <= kept}
        merged = {part for parts in self._parts.values() for part in parts}
        made = [item for module in self._parts for item in self._merged(module, torch.device("meta")).items()]
        entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made]
        for name, stored in self._stored.items():
            if name not in merged:
                entries.append(Entry(name, self._tensors.dtype(stored), self._tensors.shape(stored) or ()))
        super().__init__(folder, entries)

    def elements(self, name: str, counts: Iterable[int]) -> Iterator[Tensor]:
        if _module(name) not in self._parts:
            yield from self._tensors.elements(self._stored[name], counts)
        else:
            yield from self._merged(_module(name), torch.device("cpu"))[name].reshape(-1).split(list(counts))

    def verify(self, names: Iterable[str]) -> None:
        """Compare the hashes of the files that hold what these are made of. Raises CheckpointError."""
        self._tensors.verify(self._stored[part] for name in names for part in self._parts.get(_module(name), [name]))

    def _merged(self, module: str, device: torch.device) -> dict[str, Tensor]:
        found = {part: self._read(self._stored[part], device) for part in self._parts[module]}
        for converter in reversed(self._converters):
            found = converter.merged(found)
        return found

    def _read(self, name: str, device: torch.device) -> Tensor:
        shape = torch.Size(self._tensors.shape(name) or ())
        if device.type == "meta":
            return torch.empty(shape, dtype=self._tensors.dtype(name), device=device)
        [whole] = self._tensors.elements(name, [shape.numel()])
        return whole.view(shape)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


PIECE_ELEMENTS = 2**20
"""Number of elements in memory at a time."""
_OF_THE_FILE = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
"""Keys of a generation_config.json that are written anew."""
SMALL_FILES = 64 * 2**20
"""An allowance for headers, configs and the tokenizer in the check of disk space."""


@dataclass(frozen=True)
class Exported:
    """Result of an export. nbytes: bytes of all tensors; files: number of files with tensors; trimmed: tokens left out."""

    out: Path
    checkpoint: Path
    architecture: str
    dtypes: set[torch.dtype]
    nbytes: int
    files: int
    trimmed: int


def export(
    checkpoint: Path | str,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: str | None = None,
    trim_vocab: bool = False,
    ema: bool = False,
    merge: bool = False,
    progress: bool = False,
) -> Exported:
    """Write config.json, generation_config.json, the tokenizer and model*.safetensors into `out`, which appears complete.

    checkpoint: a run's folder (its newest complete checkpoint) or one checkpoint; of s3://bucket/prefix a copy is made.
    dtype: of every tensor; default: as in the checkpoint. Mamba-2's A_log, D and dt_bias are no exception: the classes
        in transformers keep no parameter in fp32, they cast all to the dtype of config.json when they load.
    tokenizer: a folder, tokenizer.json or hub name; default: the checkpoint's.
    trim_vocab: leave out the rows of embedding and head beyond the tokenizer's last token.
    ema: the moving average of the weights, which a run with train.ema keeps.
    merge: of a run of adapters the weights that compute the same; otherwise its adapters alone, as peft writes them.

    Raises UserError, before it reads or writes a weight, for anything at `out`, no checkpoint, a model that no
    published class expresses, a tokenizer that does not fit, tensors that are not the config's, too little disk space;
    and later for a damaged shard, or a weight that float16 cannot hold.
    """
    refuse_existing(out)

    def write(folder: Path, manifest: Manifest) -> Exported:
        config = checkpoint_model_config(folder, manifest)
        base = CheckpointTensors(folder, manifest).stack[-1].manifest
        family = family_for_model(config, base.config.get(manifests.PUBLISHED))
        text = load_tokenizer(tokenizer) if tokenizer else checkpoint_tokenizer(folder, manifest)
        _check_tokenizer(text, config)
        adapt = checkpoint_adaptations(folder, manifest)
        if adapt is not None and adapt.lora is not None and not merge:
            if trim_vocab:
                raise UserError("--trim-vocab: the rows are the base's; use it with --merge")
            if adapt.train is not None:
                raise UserError(
                    "adapt.train changed weights of the base, which a folder of adapters has not; use --merge"
                )
            return _export_adapters(folder, manifest, config, family, out, dtype, ema)
        changes = converters_of(config, adapt)
        for change in changes:
            config = change.merged_config(config)
        plain = {weight.ours: weight.shape for weight in family.weights(config)}
        tensors = CheckpointWeights(folder, manifest, plain, changes, ema)
        _check_tensors(tensors, family.weights(config), folder)
        trimmed = max(config.vocab_size - text.vocab_size, 0) if trim_vocab else 0
        config = config.model_copy(update={"vocab_size": config.vocab_size - trimmed})
        weights = family.weights(config)

        parts = [part for weight in weights for part in weight.parts]
        source = {part.name: tensors.dtype(weight.ours) for weight in weights for part in weight.parts}
        entries = [Entry(part.name, dtype or source[part.name], part.shape) for part in parts]
        shards = split_into_files(entries, max_shard_bytes)
        nbytes = sum(entry.nbytes for entry in entries)
        require_space(out, nbytes + SMALL_FILES)
        tensors.verify(plain)

        with ByteBar(progress, nbytes, title="export") as bar, atomic_folder(out) as partial:
            # The largest tensor's dtype is the model's; all are alike unless the checkpoint mixes them.
            main = max(entries, key=lambda entry: entry.nbytes).dtype
            _write_configs(partial, family.write_config(config), main, text)
            pieces = _pieces(tensors, weights)
            for name, shard in zip(safetensors_names(len(shards)), shards, strict=True):
                _write_shard(partial / name, shard, pieces, bar.advance)
            if len(shards) > 1:
                _write_index(partial, shards, nbytes)
        dtypes = {entry.dtype for entry in entries}
        return Exported(out, folder, family.architecture, dtypes, nbytes, len(shards), trimmed)

    return Repository(checkpoint).read(write)


def _export_adapters(
    folder: Path,
    manifest: Manifest,
    config: ModelConfig,
    family: Family,
    out: Path,
    dtype: torch.dtype | None,
    ema: bool,
) -> Exported:
    adapt = checkpoint_adaptations(folder, manifest)
    [lora] = [one for one in converters_of(config, adapt) if isinstance(one, Lora)]
    stored = CheckpointTensors(folder, manifest)
    if ema:
        indexes.require_average(folder, stored.stack[0].index)
    prefix = "ema." if ema else "model."
    names = [name for name in stored.names(prefix) if lora.place_of(name.removeprefix(prefix))]
    stored.verify(names)
    tensors = dict[str, Tensor]()
    for name in names:
        shape = torch.Size(stored.shape(name) or ())
        [whole] = stored.elements(name, [shape.numel()])
        tensors[name.removeprefix(prefix)] = whole.view(shape).to(dtype or whole.dtype)
    with atomic_folder(out) as partial:
        nbytes = write_peft(partial, lora, tensors, config, family, manifest.base)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return Exported(out, folder, f"adapters of {family.architecture}", dtypes, nbytes, 1, 0)


def _check_tokenizer(tokenizer: TextTokenizer, config: ModelConfig) -> None:
    if tokenizer.rows_needed > config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; "
            "name the tokenizer it was trained with with --tokenizer"
        )


def _check_tensors(tensors: TensorReader, weights: list[Weight], folder: Path) -> None:
    """Compare names and shapes. Raises CheckpointError with every parameter that is missing, wrong, or would be lost."""
    wrong = []
    for weight in weights:
        shape = tensors.shape(weight.ours)
        if shape is None:
            wrong.append(f"{weight.ours} {list(weight.shape)} is missing")
        elif shape != weight.shape:
            wrong.append(f"{weight.ours} has shape {list(shape)}, its config says {list(weight.shape)}")
    known = {weight.ours for weight in weights}
    lost = [name for name in tensors.names("") if name not in known]
    wrong += [f"{name} has no place in the model of its config" for name in lost]
    if wrong:
        raise CheckpointError(
            f"{folder} does not hold the parameters of its config:\n  " + first_few(wrong, 20, "\n  ")
        )


def _pieces(tensors: TensorReader, weights: list[Weight]) -> Iterator[tuple[str, Tensor]]:
    """Yield (published name, some of its elements), in order: our parameter is the flat concatenation of its parts. What the
    checkpoint has beyond is rows of the vocabulary that are left out."""
    for weight in weights:
        plan = [(part.name, count) for part in weight.parts for count in piece_counts(math.prod(part.shape))]
        if weight.reordered:  # read whole
            whole = tensors.elements(weight.ours, [math.prod(weight.shape)])
            split = weight.split(next(whole).view(weight.shape))
            elements = (piece for part in split.values() for piece in part.reshape(-1).split(PIECE_ELEMENTS))
            next(whole, None)
        else:
            rest = math.prod(tensors.shape(weight.ours) or ()) - math.prod(weight.shape)
            elements = tensors.elements(weight.ours, [*(count for _, count in plan), *piece_counts(rest)])
        for name, _ in plan:
            yield name, next(elements)
        for _ in elements:  # raises if there are more
            pass


def piece_counts(total: int) -> list[int]:
    """Elements of the pieces in which a tensor of `total` elements is read."""
    return [min(PIECE_ELEMENTS, total - start) for start in range(0, total, PIECE_ELEMENTS)]


def _write_shard(
    path: Path, entries: list[Entry], pieces: Iterator[tuple[str, Tensor]], advance: Callable[[int], None]
) -> None:
    with TensorFile(path, entries, {"format": "pt"}) as file:  # transformers asks for the format
        for entry in entries:
            for _ in piece_counts(entry.elements):
                name, piece = next(pieces)
                assert name == entry.name, (name, entry.name)
                cast = piece.to(entry.dtype)
                if entry.dtype == torch.float16 and not torch.isfinite(cast).all():
                    raise UserError(f"{name} holds numbers that float16 cannot (above 65504); use --dtype bfloat16")
                file.append(cast)
                advance(cast.nbytes)


def _write_index(folder: Path, shards: list[list[Entry]], nbytes: int) -> None:
    names = safetensors_names(len(shards))
    places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(places.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def _write_configs(folder: Path, config: dict[str, Any], dtype: torch.dtype, tokenizer: TextTokenizer) -> None:
    tokenizer.save(folder)
    ids = _token_ids(tokenizer)
    write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")} | ids)
    ids |= {"eos_token_id": _ends(tokenizer, config["vocab_size"])}
    given = {name: token for name, token in ids.items() if token is not None}
    # Without a padding token generate() takes the end of a document, and says so each time.
    carried = {name: value for name, value in tokenizer.generation_config.items() if name not in _OF_THE_FILE}
    write_json(folder / "generation_config.json", carried | {"pad_token_id": tokenizer.eod_id} | given)


def _ends(tokenizer: TextTokenizer, rows: int) -> int | list[int]:
    """The end of a document, and the special tokens besides that end an answer of the published model. rows: of the embedding."""
    special = {id_ for id_, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    ends = [id_ for id_ in tokenizer.end_ids if id_ == tokenizer.eod_id or (id_ in special and id_ < rows)]
    return ends if len(ends) > 1 else ends[0]


def _token_ids(tokenizer: TextTokenizer) -> dict[str, Any]:
    """Token ids for config.json; null for a missing token, where the defaults of the classes are ids of another tokenizer."""
    bos, pad = map(tokenizer.role_id, ("bos", "pad"))
    return {"bos_token_id": bos, "eos_token_id": tokenizer.eod_id, "pad_token_id": pad}


def safetensors_names(count: int) -> list[str]:
    """Names of `count` files, as transformers writes them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
