"""Prepared folders of the streams of a mixture, the settings that train on them, and the share to hold out for so many tokens."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.config.output_folder import replace_file
from llmtrain.config.regular_file import read_text
from llmtrain.data.chat.prepare import train_tokenizer
from llmtrain.data.chat.recognise import recognised
from llmtrain.data.partitions.prepared_folder import PreparedFolder, fingerprint, lock_folder, setting
from llmtrain.data.prepare import prepare
from llmtrain.data.sources.compression import DAMAGES, decompress
from llmtrain.data.sources.files import PrepareError, SourceFile, list_files
from llmtrain.data.sources.formats import NotText, sniff
from llmtrain.data.sources.record_text import parse_line
from llmtrain.data.sources.sample import proof_texts
from llmtrain.data.sources.storage import open_file
from llmtrain.data.sources.token_kinds import token_kind
from llmtrain.data.tokenize.tokenizer import load_tokenizer
from llmtrain.schema.data import PrepareConfig

DATA_YAML = "data.yaml"
_SAMPLED_FILES, _SAMPLED_BYTES = 8, 4 << 20
_BYTES_PER_TOKEN = 4.0
"""Assumed where the tokenizer is still to be trained."""
_STEP = 1.1


@dataclass(frozen=True)
class PreparedStreams:
    """Prepared folders by stream, and the file that names them as `data` of a run's YAML."""

    folders: dict[str, PreparedFolder]
    yaml: Path

    def summary(self) -> str:
        lines = [f"{name}: {folder.summary()}" for name, folder in self.folders.items()]
        return "\n".join([*lines, f"{self.yaml}: the streams as `data` of a run's YAML, mixed by their tokens"])


def prepare_all(
    config: PrepareConfig, *, overwrite: bool = False, progress: bool = True
) -> PreparedFolder | PreparedStreams:
    """Prepare `config.sources` or `config.streams`, with its `validation_tokens`. Raises what `prepare` raises."""
    if config.streams:
        return prepare_streams(config, overwrite=overwrite, progress=progress)
    return prepare(hold_out(config), overwrite=overwrite, progress=progress)


def prepare_streams(config: PrepareConfig, *, overwrite: bool = False, progress: bool = True) -> PreparedStreams:
    """Prepare the sources of each of `config.streams` into a folder of its name in `config.out`, with one tokenizer, and write
    DATA_YAML there.

    Raises what `prepare` raises.
    """
    out = Path(config.out).expanduser().absolute()
    each = {name: hold_out(one) for name, one in config.each().items()}
    if config.vocab_size is not None:
        tokenizer = _train_tokenizer(out, list(each.values()))
        each = {name: one.model_copy(update={"tokenizer": tokenizer, "vocab_size": None}) for name, one in each.items()}
    folders = {name: prepare(one, overwrite=overwrite, progress=progress) for name, one in each.items()}
    file = out / DATA_YAML
    replace_file(file, _yaml(config.seq_len, folders).encode())
    return PreparedStreams(folders, file)


def _train_tokenizer(out: Path, configs: Sequence[PrepareConfig]) -> str:
    """A tokenizer of all streams' training text, which is trained once: a folder."""
    folder, size = out / "tokenizer", configs[0].vocab_size
    assert size is not None
    files = [list_files(config.sources) for config in configs]
    chats = [setting(config, "chat") for config in configs]
    inputs = {
        "vocab_size": size,
        "shares": [config.validation_fraction for config in configs],
        **({"chat": chats} if any(chats) else {}),
        "files": [[(file.name, file.size, file.mtime_ns) for file in some] for some in files],
    }
    made_from = folder / "made_from"
    with lock_folder(folder):
        if not (made_from.is_file() and read_text(made_from) == fingerprint(inputs)):
            train_tokenizer(list(zip(configs, files, strict=True))).save(folder)
            replace_file(made_from, fingerprint(inputs).encode())
    return str(folder)


def _yaml(seq_len: int, folders: Mapping[str, PreparedFolder]) -> str:
    tokens = {name: folder.split("train")["tokens"] for name, folder in folders.items()}
    lines = ["data:", f"  seq_len: {seq_len}", "  train:", "    streams:"]
    for name, folder in folders.items():
        share = round(tokens[name] / sum(tokens.values()), 6)
        place = json.dumps(str(folder.out))  # JSON's strings are YAML's
        lines.append(f"      {name}: {{local: {place}, split: train, proportion: {share}}} # {tokens[name]:,} tokens")
    held = {name: folder for name, folder in folders.items() if "validation" in folder.manifest["splits"]}
    lines += ["  validation: # each stream's loss is reported apart", "    streams:"] if held else []
    for name, folder in held.items():
        lines.append(f"      {name}: {{local: {json.dumps(str(folder.out))}, split: validation}}")
    if any(folder.manifest["inputs"]["packing"] != "concatenate" for folder in folders.values()):
        lines.append("  mask_documents: true")
    return "\n".join(lines) + "\n"


def hold_out(config: PrepareConfig) -> PrepareConfig:
    """The config, `recognised`, with the share of documents that holds about `validation_tokens`, where it has them, by an estimate
    from a sample.

    The share is rounded up to a power of 1.1, so that a few files more do not change which documents are held out.
    Raises PrepareError if that is more than half of the text.
    """
    config, tokens = recognised(config), config.validation_tokens
    if tokens is None:
        return config
    files = list_files(config.sources)
    total = sum(file.size for file in files) * _tokens_per_stored_byte(config, files)
    share = _STEP ** math.ceil(math.log(tokens / max(total, 1.0), _STEP))
    if share > 0.5:
        raise PrepareError(
            f"validation_tokens: {tokens:,} tokens are more than half of the about {round(total):,} in "
            f"{', '.join(config.sources)}; hold out fewer"
        )
    return config.model_copy(update={"validation_fraction": share})


def _tokens_per_stored_byte(config: PrepareConfig, files: Sequence[SourceFile]) -> float:
    chosen = [files[len(files) * number // _SAMPLED_FILES] for number in range(min(_SAMPLED_FILES, len(files)))]
    if any(token_kind(file.path, file.from_folder) for file in chosen):
        return 0.5
    stored = sum(file.size for file in chosen)
    # Of conversations, all is text.
    text = sum(file.size * _text_share(file, config.text_key if config.chat is None else "") for file in chosen)
    per_token = _BYTES_PER_TOKEN
    if config.tokenizer is not None and config.chat is None:
        texts = proof_texts(list(files), config.text_key)[::4]
        tokenizer = load_tokenizer(config.tokenizer)
        count = sum(len(tokenizer.encode(text)) + 1 for text in texts)
        per_token = sum(len(text.encode()) for text in texts) / max(count, 1) or _BYTES_PER_TOKEN
    return text / max(stored, 1) / per_token


def _text_share(file: SourceFile, text_key: str) -> float:
    """Bytes of text for each stored byte of a file, from its beginning. text_key: empty where all is text."""
    try:
        with open_file(file.path) as stream:
            found = sniff(stream, file.name, text_key, file.from_folder)
            stream.seek(0)
            if found.kind == "parquet":
                return _parquet_share(stream, file, text_key)
            with decompress(stream, found.compression) as plain:
                data = plain.read(_SAMPLED_BYTES)
                packed = len(data) / max(min(stream.tell(), file.size), 1) if found.compression else 1.0
    except (NotText, *DAMAGES):
        return 0.0
    if found.kind != "jsonl" or not data or not text_key:
        return packed
    texts = [parse_line(line, text_key)[0] for line in data.split(b"\n") if line.strip()]
    return packed * sum(len(text.encode()) for text in texts) / len(data)


def _parquet_share(stream, file: SourceFile, text_key: str) -> float:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(stream)
    if not table.num_row_groups:
        return 0.0
    group = table.metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    text = sum(one.total_uncompressed_size for one in columns if one.path_in_schema.startswith(text_key.split(".")[0]))
    return text / max(file.size, 1) * table.metadata.num_rows / max(group.num_rows, 1)
