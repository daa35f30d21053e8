"""Import of a folder in Hugging Face format as a checkpoint: to generate from, to train on, to export again."""

import json
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmtrain.adapt.peft_folder import BASE
from llmtrain.adapt.peft_read import read_peft, recorded_base
from llmtrain.checkpoint.beneath import base_of
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import Manifest
from llmtrain.checkpoint.repository import Repository
from llmtrain.config.output_folder import atomic_folder, refuse_existing, require_space
from llmtrain.convert.checkpoint_tensors import CheckpointTensors
from llmtrain.convert.export import SMALL_FILES
from llmtrain.convert.lazy_checkpoint import PIECE_BYTES, LazyTensor, write_parameters
from llmtrain.data.tokenize.stored_tokenizer import CHECKSUMS, NoTokenizerError, checksums
from llmtrain.data.tokenize.tokenizer import TextTokenizer, load_tokenizer
from llmtrain.errors import UserError
from llmtrain.generate.load import checkpoint_tokenizer
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Weight, family_of_hf_config
from llmtrain.models.hf.foreign_files import refuse_links_out
from llmtrain.models.hf.hf_checkpoint import HFCheckpoint, find_hf_folder, open_hf_checkpoint
from llmtrain.models.hf.load import check_tensors
from llmtrain.progress import ByteBar
from llmtrain.versions import versions

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Imported:
    """Result of an import. parameters: their number; nbytes: their bytes in fp32."""

    out: Path
    source: Path
    architecture: str
    parameters: int
    nbytes: int
    has_tokenizer: bool


def import_adapters(source: Path, out: Path, base: str | None) -> Imported:
    """Write a checkpoint of step 0 that holds the adapters of a folder of peft's, in fp32, and names the one beneath, whose
    tokenizer it has.

    base: the checkpoint of their base; default: the one that an export of ours names.
    Raises UserError for anything at `out`, a base that is not given, and adapters of another one.
    """
    refuse_existing(out)
    record = recorded_base(source)
    if base is None and record is None:
        raise UserError(
            f"{source} holds adapters; name the checkpoint of their base: --base CHECKPOINT (llmtrain import makes one)"
        )
    checkpoint = Repository(base or str((record or {})["address"])).find()
    manifest = checkpoint.require()
    if record is not None and record["save_id"] != manifest.save_id:
        raise UserError(
            f"{source / BASE}: adapters of save {record['save_id']}; {checkpoint.address} is another one ({manifest.save_id})"
        )
    if manifest.config.get("adapt"):
        raise UserError(f"{checkpoint.address} holds adapters itself; --base names a whole model")
    folder = checkpoint.fetch()
    found = read_peft(
        source,
        ModelConfig.model_validate_json(json.dumps(manifest.config["model"])),
        manifest.config.get(manifests.PUBLISHED),
    )
    stored = CheckpointTensors(folder, manifest)
    for name, tensor in found.beneath.items():
        [whole] = stored.elements(f"model.{name}", [tensor.numel()])
        if not torch.equal(whole.view(tensor.shape).to(tensor.dtype), tensor):
            raise UserError(
                f"{source}: {name} of the base is another one there than in {checkpoint.address}; give their base"
            )
    save_id, tokenizer = str(uuid.uuid4()), None
    with suppress(NoTokenizerError):
        tokenizer = checkpoint_tokenizer(folder, manifest)
    with atomic_folder(out) as partial:
        made = [LazyTensor(name, tuple(t.shape), bind(torch.Tensor.float, t)) for name, t in found.tensors.items()]
        files = write_parameters(partial, made, lambda n: None, save_id)
        config = manifest.config | {"adapt": found.adapt.model_dump(mode="json")}
        if tokenizer is not None:
            tokenizer.save(partial / "tokenizer")
            config |= {CHECKSUMS: checksums(partial / "tokenizer")}
        extra = {"step": 0, "tokens": 0, "clock": {}, "data": {}, "versions": versions("torch")}
        manifests.write(
            partial, Manifest(save_id=save_id, config=config, files=files, base=base_of(checkpoint), **extra)
        )
    parameters = sum(tensor.numel() for tensor in found.tensors.values())
    return Imported(out, source, "adapters", parameters, 4 * parameters, tokenizer is not None)


def import_hf(source: str, out: Path, *, progress: bool = False) -> Imported:
    """Write a checkpoint of step 0, fp32 and without optimizer state, into `out`, which appears complete, with tokenizer/
    (when the source has one) and model.yaml (the `model` section for a run's YAML).

    source: a folder with config.json and weights, or a name on the Hugging Face hub.
    Raises UserError, before it reads or writes a weight, for anything at `out`, a source that is not there, a model
    that llmtrain cannot express, tensors that are not the config's, or too little disk space; and later for damaged files and
    values that are not finite.
    """
    refuse_existing(out)
    folder = find_hf_folder(source)
    refuse_links_out(folder)
    published = open_hf_checkpoint(folder)
    family = family_of_hf_config(published.config)
    section = family.read_config(published.config)
    config = ModelConfig.model_validate(section)
    weights = family.weights(config)
    check_tensors(published, weights)
    tokenizer = _load_own_tokenizer(folder)
    of_family = {manifests.PUBLISHED: family.model_type}
    parameters = sum(part.size for weight in weights for part in weight.parts)
    nbytes = parameters * torch.float32.itemsize
    require_space(out, nbytes + SMALL_FILES)

    with ByteBar(progress, nbytes, title="import") as bar, atomic_folder(out) as partial:
        save_id, written = str(uuid.uuid4()), {}
        files = write_parameters(partial, _lazy_tensors(published, weights), bar.advance, save_id)
        if tokenizer is not None:
            tokenizer.save(partial / "tokenizer")
            written[CHECKSUMS] = checksums(partial / "tokenizer")
        (partial / "model.yaml").write_text(_model_yaml(section, source), encoding="utf-8")
        manifests.write(
            partial,
            Manifest(
                save_id=save_id,
                step=0,
                tokens=0,
                # No data: where others keep the way to their tokenizer.
                config={"model": config.model_dump(mode="json"), "data": {"prepare": None, "train": None}}
                | of_family
                | written,
                clock={},
                data={},
                versions=versions("torch"),
                files=files,  # the tensors: the tokenizer and model.yaml may be edited
            ),
        )
    return Imported(out, folder, family.architecture, parameters, nbytes, tokenizer is not None)


def _lazy_tensors(published: HFCheckpoint, weights: list[Weight]) -> Iterator[LazyTensor]:
    for weight in weights:
        yield LazyTensor(weight.ours, weight.shape, bind(_join, published, weight))


def _join(published: HFCheckpoint, weight: Weight) -> Tensor:
    names = [name for part in weight.parts for name in part.names if name in published]
    try:
        joined = weight.join({name: _read(published, name) for name in names})
    except (ValueError, SafetensorError) as error:
        raise UserError(f"{published.folder}: {error}") from error
    # By small pieces, as isfinite makes several masks and a copy.
    if bad := sum(piece.numel() - int(piece.isfinite().sum()) for piece in joined.reshape(-1).split(PIECE_BYTES // 16)):
        raise UserError(
            f"{published.folder}: {', '.join(names)}: {bad:,} of {joined.numel():,} values are not finite: the file is damaged, or "
            "a run that had diverged was saved; take another of its checkpoints"
        )
    return joined


def _read(published: HFCheckpoint, name: str) -> Tensor:
    """Read one tensor. The library maps a file into memory and keeps the pages that were read as long as the file is open, in
    the end all of the model; therefore the file is opened anew for each tensor."""
    file = published.file(name)
    if file.suffix != ".safetensors":
        return published[name]  # mapped too, but opening it means unpickling it
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def _load_own_tokenizer(folder: Path) -> TextTokenizer | None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return load_tokenizer(folder)


def _model_yaml(section: dict[str, Any], source: str) -> str:
    text = yaml.safe_dump({"model": section}, sort_keys=False, default_flow_style=None, width=110)
    return f"# {source}, as `llmtrain import` read it. Paste it into a run's YAML, with init_from: the folder of this file.\n{text}"
