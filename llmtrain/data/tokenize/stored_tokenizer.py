"""The tokenizer of a run: beside its shards, and in its checkpoints as one file, whose hash the manifest lists."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from llmtrain.config.checksums import checksum
from llmtrain.config.regular_file import parse_json, read_text
from llmtrain.data.partitions.prepared_folder import read_manifest
from llmtrain.data.tokenize.tokenizer import COMPANIONS, CONFIG_FILES, TextTokenizer, TokenizerError, load_tokenizer
from llmtrain.errors import UserError
from llmtrain.logs import log

NAME = "tokenizer.files.json"
"""The file in a checkpoint: {file of the tokenizer's folder: its text}."""

CHECKSUMS = "tokenizer_files"
"""The key of `checksums` in the config of an import's manifest."""


class NoTokenizerError(UserError):
    """There is no tokenizer where one may lie."""


def pack(folder: Path) -> bytes:
    """The files of a tokenizer's folder that `load_tokenizer` reads. Raises TokenizerError for one that cannot be read."""
    return json.dumps(_texts(folder), indent=0, sort_keys=True).encode()


def _texts(folder: Path) -> dict[str, str]:
    files = {}
    for pattern in ("tokenizer.json", *CONFIG_FILES, *COMPANIONS):
        for file in sorted(folder.glob(pattern)):
            try:
                files[str(file.relative_to(folder))] = read_text(file)
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{file} cannot be read: {error}") from None
    return files


def checksums(folder: Path) -> dict[str, str]:
    """xxh3_128 of each file that `pack` takes, by name, as the manifest of an import records them. Raises TokenizerError."""
    return {name: checksum(text.encode()) for name, text in _texts(folder).items()}


def load_imported(folder: Path, recorded: dict[str, str] | None) -> TextTokenizer:
    """The tokenizer in an import, whose files may be edited; a warning names those that were. recorded: their checksums, of an
    earlier llmtrain None. Raises TokenizerError."""
    changed = {name for name, _ in recorded.items() ^ checksums(folder).items()} if recorded is not None else set()
    if recorded is None and not (folder / CONFIG_FILES[0]).exists():
        changed = {CONFIG_FILES[0]}
    if changed:
        log.warning(
            f"{folder}: {', '.join(sorted(changed))}: changed, added or gone since the import; read as it is now"
        )
    return load_tokenizer(folder)


def unpack(content: bytes, place: Path) -> TextTokenizer:
    """The tokenizer of packed files. place: of the packed file, for messages. Raises TokenizerError."""
    with tempfile.TemporaryDirectory() as copies:
        for name, text in _files(content, place).items():
            file = Path(copies, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        try:
            return replace(load_tokenizer(copies), folder=place.parent)
        except TokenizerError as error:
            raise TokenizerError(str(error).replace(copies, str(place))) from None


def same_tokens(content: bytes, place: Path, folder: Path) -> bool:
    """True if the packed tokenizer and that of a folder make the same tokens of a text: their tokenizer.json is the same, and so
    are the special tokens that their tokenizer_config.json names. Raises TokenizerError."""
    return _meaning(_files(content, place)) == _meaning(_files(pack(folder), folder))


def _meaning(files: dict[str, str]) -> tuple[object, ...]:
    try:
        configs = [parse_json(files.get(name, "{}")) for name in CONFIG_FILES]
        special = [{name: value for name, value in config.items() if name.endswith("_token")} for config in configs]
        return parse_json(files.get("tokenizer.json", "null")), special
    except (ValueError, AttributeError):
        return tuple(files.items())


def _files(content: bytes, place: Path) -> dict[str, str]:
    try:
        files = parse_json(content)
        assert all(isinstance(text, str) and ".." not in Path(name).parts for name, text in files.items())
        assert not any(Path(name).is_absolute() for name in files)
    except (ValueError, AttributeError, AssertionError):
        raise TokenizerError(f"{place} holds no tokenizer") from None
    return files


def load_run_tokenizer(data: dict) -> TextTokenizer:
    """The tokenizer beside a run's shards, as it was trained with. data: as in run_tokenizer_path, which see for errors."""
    return as_trained(load_tokenizer(run_tokenizer_path(data)), data)


def as_trained(tokenizer: TextTokenizer, data: dict) -> TextTokenizer:
    """The tokenizer with the tokens that began the documents of a run, as its data's manifest or its `data.prepare` record them;
    unchanged for data of others, and for an import. data: the config's `data` section. Raises PrepareError."""
    prepare = data.get("prepare") or {}
    for folder in (folder for place in _places(data) for folder in (Path(place), Path(place).parent)):
        manifest = read_manifest(folder.expanduser())
        if manifest is not None and isinstance(about := manifest.get("tokenizer"), dict):
            if "begin_id" in about:
                return replace(tokenizer, begins=(about["begin_id"],))
            prepare = prepare or manifest.get("inputs", {})
            break
    if not prepare:
        return tokenizer
    return replace(tokenizer, begins=(tokenizer.bos_id,) if prepare.get("add_bos_token") else ())


def run_tokenizer_path(data: dict) -> str:
    """Path of the tokenizer beside a run's shards. data: its config's `data` section. Raises NoTokenizerError if there is none."""
    if found := run_tokenizers(data):
        return str(found[0])
    if not (places := _places(data)):
        raise NoTokenizerError("no tokenizer/ folder in it, and no shards that it was trained on")
    raise NoTokenizerError(f"no tokenizer/ folder beside the run's shards ({', '.join(places)})")


def run_tokenizers(data: dict) -> list[Path]:
    """Folders of the tokenizers beside a run's shards, of those streams that have one."""
    return [path for place in _places(data) if (path := Path(place) / "tokenizer").is_dir()]


def _places(data: dict) -> list[str]:
    prepare, train = data.get("prepare"), data.get("train")
    candidates = (
        [prepare["out"], *(f"{prepare['out']}/{name}" for name in prepare.get("streams") or ())] if prepare else []
    )
    return candidates + ([stream["local"] for stream in train["streams"].values()] if train else [])
