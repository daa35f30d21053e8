"""Token files of Megatron, datatrove and OLMo, written here from their formats' definitions: every document comes back as it is."""

import gzip
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmtrain.data.partitions import cutting as partitions
from llmtrain.data.prepare import prepare
from llmtrain.data.shards.stored_stream import open_place
from llmtrain.data.sources import token_files
from llmtrain.data.sources.files import PassedOver, PrepareError, list_files
from llmtrain.data.sources.records import SetAside, Slice
from llmtrain.data.sources.token_documents import token_bytes
from llmtrain.data.sources.token_files import TokenSlice, read_tokens
from llmtrain.data.sources.token_kinds import token_kind
from llmtrain.data.tokenize.tokenizer import TextTokenizer, train_bpe
from llmtrain.schema.data import PrepareConfig
from tests.support.prepared import documents as prepared_documents
from tests.support.prepared import small

EOD, VOCABULARY = 0, 300
Documents = list[list[int]]
Writer = Callable[[Path, Documents], Path]


def megatron(path: Path, documents: Documents, dtype: str = "uint16", code: int = 8, sentences: int = 1) -> Path:
    """MMapIndexedDataset: a document is one sequence, or one per sentence."""
    parts = [part for ids in documents for part in np.array_split(np.array(ids, dtype), sentences)]
    sizes = np.array([len(part) for part in parts], np.int32)
    pointers = np.cumsum([0, *(sizes[:-1].astype(np.int64) * np.dtype(dtype).itemsize)], dtype=np.int64)[: len(sizes)]
    borders = np.arange(0, len(parts) + 1, sentences, dtype=np.int64)
    path.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in parts))
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    header += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(borders))
    path.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + borders.tobytes())
    return path.with_suffix(".bin")


def datatrove(path: Path, documents: Documents, itemsize: int = 2) -> Path:
    """DocumentTokenizer: tokens, the documents' ends, and what is written for people to read."""
    file = path.with_suffix(".ds")
    file.write_bytes(b"".join(np.array(ids, f"<u{itemsize}").tobytes() for ids in documents))
    ends = np.cumsum([len(ids) for ids in documents]).tolist()
    Path(f"{file}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    Path(f"{file}.metadata").write_text(f"tokenizer|{itemsize}\n{sum(map(len, documents))}\n1.0K")
    return file


def numpy_array(path: Path, documents: Documents) -> Path:
    np.save(path.with_suffix(".npy"), np.concatenate([np.array(ids, np.uint16) for ids in documents]))
    return path.with_suffix(".npy")


def olmo(path: Path, documents: Documents, dtype: str = "uint16") -> Path:
    """dolma's MemmapWriter: numpy.memmap, so without numpy's header, and a table of the documents beside."""
    file, end, rows = path.with_suffix(".npy"), 0, []
    file.write_bytes(b"".join(np.array(ids, dtype).tobytes() for ids in documents))
    for number, ids in enumerate(documents):
        rows.append(f"{end},{end + len(ids)},id-{number},source.jsonl.gz,{number + 1}")
        end += len(ids)
    path.with_suffix(".csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    return file


FORMATS: dict[str, Writer] = {
    "Megatron": megatron,
    "Megatron in int32": lambda path, documents: megatron(path, documents, "int32", 4),
    "Megatron in sentences": lambda path, documents: megatron(path, documents, sentences=3),
    "datatrove": datatrove,
    "datatrove of 4 bytes": lambda path, documents: datatrove(path, documents, 4),
    "OLMo": olmo,
    "OLMo in uint32": lambda path, documents: olmo(path, documents, "uint32"),
}


@pytest.fixture
def some() -> Documents:
    rng = random.Random(1)
    return [[*(rng.randint(1, VOCABULARY - 1) for _ in range(rng.choice([1, 3, 50, 200]))), EOD] for _ in range(40)]


@pytest.fixture
def tokenizer(tmp_path) -> TextTokenizer:
    made = train_bpe(["the quick brown fox jumps over lazy dogs, naïve café 走 "] * 50, VOCABULARY, or_fewer=True)
    made.save(tmp_path / "tokenizer")
    return made


def slices(path: Path, step: int | None = None) -> list[TokenSlice]:
    """A file in slices of so many bytes."""
    [file] = list_files([str(path)])
    kind = token_kind(str(path), from_folder=False)
    assert kind is not None
    step = step or file.size
    parts = [Slice(file, begin, min(begin + step, file.size)) for begin in range(0, file.size, step)]
    return [read_tokens(part, kind, VOCABULARY, EOD, {EOD: "<|endoftext|>"}) for part in parts]


def read(path: Path, step: int | None = None) -> Documents:
    """The documents of a file, read in slices of so many bytes."""
    found: Documents = []
    for part in slices(path, step):
        found += [ids.tolist() for ids in np.split(part.ids, part.ends[:-1])] if len(part.ends) else []
        assert len(part.records) == len(part.ends)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_every_document_comes_back_wherever_the_file_is_cut(tmp_path, some, name, monkeypatch):
    path = FORMATS[name](tmp_path / "file", some)
    assert read(path) == some
    for step in (7, 64, 501, 4096):
        assert read(path, step) == some, step


@pytest.mark.parametrize("first", [0, 1])
def test_documents_begun_by_the_token_that_ends_them_come_back_too(tmp_path, some, first):
    """BOS = EOS, of a .npy, which has no table of its documents. first: the first document that begins so."""
    wanted = [[EOD, *ids] for ids in some]
    wanted[:first] = [ids[1:] for ids in wanted[:first]]
    path = olmo(tmp_path / "file", wanted)
    for step in (None, 2, 4, 7, 64, 501, 4096):
        assert (read(path, step) == wanted) == (first == 0), step


@pytest.mark.parametrize("name", FORMATS)
def test_the_records_number_the_documents(tmp_path, some, name):
    path = FORMATS[name](tmp_path / "file", some)
    kind, parts = token_kind(str(path), from_folder=False), slices(path, 999)
    records = [record for part in parts for record in part.records.tolist()]
    starts = [sum(map(len, some[:number])) for number in range(len(some))]
    assert records == (starts if kind == "npy" else list(range(len(some))))


@pytest.mark.parametrize("name", FORMATS)
def test_the_samples_are_those_of_the_text(tmp_path, tokenizer, name):
    rng = random.Random(2)
    texts = [
        " ".join(rng.choice(["the", "quick", "brown", "naïve", "café", "走", "dogs"]) for _ in range(30))
        for _ in range(200)
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = FORMATS[name](tmp_path / "file", [[*tokenizer.encode(text), tokenizer.eod_id] for text in texts])
    made = {}
    for kind, source in (("text", tmp_path / "texts.jsonl"), ("tokens", path)):
        made[kind] = prepare(small(tmp_path, source, out=str(tmp_path / kind)), progress=False)
    assert made["text"].split("train") == made["tokens"].split("train")
    stored = [open_place(str(folder.out / "train")) for folder in made.values()]
    text, tokens = ([one.tokens(number) for number in range(len(one.index.shards))] for one in stored if one)
    assert all(np.array_equal(one, other) for one, other in zip(text, tokens, strict=True))


def test_the_bytes_of_held_out_tokens_are_those_of_their_text(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(partitions, "PARTITION_BYTES", 3000)
    texts = [f"the naïve 走 fox {number} {'dogs ' * (number % 17)}" for number in range(300)]
    documents = [[*tokenizer.encode(text), tokenizer.eod_id] for text in texts]
    source = megatron(tmp_path / "file", documents)
    made = prepare(small(tmp_path, source, seq_len=16, validation_fraction=0.3), progress=False)
    train, held = made.split("train"), made.split("validation")
    assert train["documents"] + held["documents"] == 300 and held["documents"] > 40
    assert train["bytes"] + held["bytes"] == sum(len(text.encode()) for text in texts)
    whole = [text for split in ("train", "validation") for text in prepared_documents(made.out, split)[:-1]]
    assert len(set(whole) & set(texts)) > 270
    assert len(made.manifest["partitions"]) > 2
    stored = open_place(str(made.out / "validation"))
    assert stored is not None
    [first, *_] = stored.documents(16).of(0) or []
    assert (first.unit, first.place) == ("document", str(tmp_path / "file.bin"))
    ids = stored.tokens(0)[0].tolist()[: first.end]
    assert tokenizer.decode([id for id in ids if id != tokenizer.eod_id]) in texts[(first.number or 0) - 1]


def prepare_all(folder: Path, source: Path):
    """Shards of one file, none of whose documents is held out."""
    return prepare(small(folder, source, seq_len=8), progress=False)


def test_a_document_without_its_end_is_closed(tmp_path, tokenizer):
    documents = [tokenizer.encode(f"the fox {number}") for number in range(40)]
    made = prepare_all(tmp_path, datatrove(tmp_path / "file", documents))
    assert prepared_documents(made.out, "train")[:5] == [f"the fox {number}" for number in range(5)]


@pytest.mark.parametrize("header", [False, True], ids=["no byte", "a header alone"])
def test_a_file_without_a_token_has_no_documents(tmp_path, tokenizer, header):
    np.save(tmp_path / "empty.npy", np.zeros(0, np.uint16)) if header else (tmp_path / "empty.npy").touch()
    with pytest.raises(PrepareError, match="the train part has 0 documents of 0 tokens"):
        prepare_all(tmp_path, tmp_path / "empty.npy")


def corrupt(path: Path, edit: Callable[[bytearray], bytes | bytearray]) -> None:
    path.write_bytes(edit(bytearray(path.read_bytes())))


@pytest.mark.parametrize(
    ("write", "edited", "edit", "said"),
    [
        (megatron, ".bin", lambda b: b[:-2], "which are not those that"),
        (megatron, ".idx", lambda b: b[:-8], "sequences and 41 borders of documents make"),
        (megatron, ".idx", lambda b: b[:17] + b"\6" + b[18:], "ids of type 6, which are no whole numbers"),
        (megatron, ".idx", lambda b: b[:9] + b"\2" + b[10:], "is not a Megatron index of version 1"),
        (megatron, ".idx", lambda b: b[:17], "ids of type 0, which are no whole numbers"),
        (megatron, ".idx", lambda b: b[:26] + b"\1" + b[27:-320], "are not all of its 40 sequences"),
        (megatron, ".idx", lambda b: b[:-8] + b"\1" + b[-7:], "are not all of its 40 sequences"),
        (megatron, ".bin", lambda b: b"\xff\xff" + b[2:], "holds token 65,535, but the tokenizer has 300 entries"),
        (datatrove, ".ds", lambda b: b[:-2], "which are not 2 or 4 for each of the"),
        (datatrove, ".ds.index", lambda b: b[:-3], "no multiple of 8"),
        (olmo, ".npy", lambda b: b[:-1], "are no multiple of 2, the bytes of a token"),
        (olmo, ".npy", lambda b: b"\x2d\x01" + b[2:], "holds token 301"),
    ],
)
def test_a_file_that_is_damaged_or_of_another_tokenizer_is_set_aside_by_name(tmp_path, some, write, edited, edit, said):
    path = write(tmp_path / "file", some)
    corrupt(tmp_path / f"file{edited}", edit)
    with pytest.raises(SetAside, match=said) as found:
        read(path)
    assert found.value.bad.where == str(path) and found.value.bad.nbytes == path.stat().st_size


@pytest.mark.parametrize(("write", "index"), [(megatron, ".idx"), (datatrove, ".ds.index"), (numpy_array, ".npy")])
def test_a_bit_of_an_index_or_a_header_is_named_or_harmless(tmp_path, some, write, index):
    """These formats have no checksum: a moved border is seen by the tokens beside it."""
    path = write(tmp_path / "file", some[:8])
    content = (tmp_path / f"file{index}").read_bytes()
    wrong = []
    bits = range(8 * 9, 8 * (min(len(content), 128) if index == ".npy" else len(content)))  # behind a kind's magic
    for bit in bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / f"file{index}").write_bytes(changed)
        try:
            if read(path) != some[:8]:
                assert len(slices(path)[0].misplaced), bit
                wrong.append(str(path))
        except SetAside as error:
            wrong.append(error.bad.where)
    assert set(wrong) == {str(path)} and len(wrong) > len(bits) / 2


@pytest.mark.parametrize("write", [megatron, datatrove])
def test_documents_beside_a_border_that_moved_are_bad_records(tmp_path, tokenizer, write):
    path = write(tmp_path / "file", [[*tokenizer.encode(f"fox {n} the dogs"), tokenizer.eod_id] for n in range(40)])
    if write is datatrove:
        corrupt(tmp_path / "file.ds.index", lambda b: b[:80] + bytes([b[80] + 2]) + b[81:])
    else:
        corrupt(tmp_path / "file.idx", lambda b: b[: -8 * 30] + bytes([b[-8 * 30] ^ 1]) + b[-8 * 30 + 1 :])
    with pytest.raises(
        PrepareError, match=r"file\.(bin|ds), document 11: its border in .*file\.(idx|ds\.index) is not where"
    ):
        prepare_all(tmp_path, path)
    made = prepare(small(tmp_path, path, seq_len=8, skip_bad_records=True), progress=False)
    names = prepared_documents(made.out, "train")
    assert "fox 10 the dogs" not in names[:12] and names[:10] == [f"fox {n} the dogs" for n in range(10)]
    assert made.split("train")["documents"] == 38
    settings = small(tmp_path, path, seq_len=8, dedup=True, out=str(tmp_path / "without-copies"))
    with pytest.raises(PrepareError, match="document 11: its border in "):
        prepare(settings, progress=False)
    once = prepare(settings.model_copy(update={"skip_bad_records": True}), progress=False)
    assert prepared_documents(once.out, "train") == names


@pytest.mark.parametrize("kind", ["no ends", "turns", "cut short", "quoted"])
def test_ends_of_other_kinds_of_documents_are_no_damage(tmp_path, some, kind):
    for number, ids in enumerate(some):
        if kind == "no ends":
            ids[-1] = 1
        elif kind == "turns" or (kind == "quoted" and number % 5 == 0):
            ids[:0] = [2, EOD, 3, EOD]
        if (kind == "turns" and number % 5 == 0) or (kind == "cut short" and number % 5 == 1):
            ids[-1:] = [1]
    path = datatrove(tmp_path / "file", some)
    assert read(path) == some and not any(len(part.misplaced) for part in slices(path, 1500))


def test_documents_that_end_with_another_special_token_are_refused(tmp_path, some):
    path = megatron(tmp_path / "file", [[*ids[:-1], 7] for ids in some])
    [file] = list_files([str(path)])
    with pytest.raises(SetAside, match=r"end with token 7 \(</s>\), but the tokenizer's end of document is token 0"):
        read_tokens(Slice(file, 0, file.size), "megatron", VOCABULARY, EOD, {0: "<|endoftext|>", 7: "</s>"})


def test_a_file_without_ends_of_documents_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_LONGEST_DOCUMENT", 1 << 20)
    (tmp_path / "file.npy").write_bytes(np.full(3 << 20, 5, np.uint16).tobytes())
    with pytest.raises(SetAside, match="token 0, which ends a document, is not in 1,048,576 tokens"):
        read(tmp_path / "file.npy", 100_000)


def test_a_mask_of_the_loss_is_refused(tmp_path, some):
    path = datatrove(tmp_path / "file", some)
    Path(f"{path}.loss").write_bytes(b"\1" * sum(map(len, some)))
    assert [file.path for file in list_files([str(tmp_path / "file.*")])] == [str(path)]
    with pytest.raises(SetAside, match=r"file\.ds\.loss takes some of its tokens out of the loss"):
        read(path)


def test_an_array_with_numpys_header_is_read_where_it_is_named(tmp_path, some):
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder/file.npy", np.concatenate([np.array(ids, np.int32) for ids in some]))
    assert read(tmp_path / "folder/file.npy", 777) == some
    with pytest.raises(PrepareError, match="holds no text"):
        list_files([str(tmp_path / "folder")])
    whole = (tmp_path / "folder/file.npy").read_bytes()
    for damaged, said in ((whole[:-4], "not those of the"), (whole[:9], "its header is damaged")):
        (tmp_path / "folder/file.npy").write_bytes(damaged)
        with pytest.raises(SetAside, match=said):
            read(tmp_path / "folder/file.npy")
    np.save(tmp_path / "folder/file.npy", np.zeros((3, 4)))
    with pytest.raises(SetAside, match=r"an array of float64 of shape \(3, 4\)"):
        read(tmp_path / "folder/file.npy")


def test_a_folder_gives_its_token_files_and_counts_what_is_beside_them(tmp_path, some):
    for number, write in enumerate((megatron, datatrove, olmo)):
        write(tmp_path / f"part-{number}", some)
    (tmp_path / "other.bin").write_bytes(b"\0\1")
    (tmp_path / "other.csv").write_text("text\nx\n")
    for source in (str(tmp_path), str(tmp_path / "part*")):
        left_out = PassedOver()
        found = [file.name for file in list_files([source], left_out)]
        assert [name for name in found if name.startswith("part")] == ["part-0.bin", "part-1.ds", "part-2.npy"]
        assert left_out.reasons["beside token files"][0] == 4
    assert token_kind(str(tmp_path / "other.bin"), from_folder=False) is None


def test_a_tokenizer_is_not_trained_on_token_files(tmp_path, some):
    config = PrepareConfig(sources=[str(olmo(tmp_path / "file", some))], out=str(tmp_path / "out"), vocab_size=300)
    with pytest.raises(PrepareError, match="holds tokens: name the tokenizer"):
        prepare(config, progress=False)


def test_bytes_of_tokens(tokenizer):
    sizes = token_bytes(tokenizer.backend, tokenizer.vocab_size)
    for text in ("the naïve 走 fox", "<|endoftext|>", "\n\t é"):
        assert sizes[tokenizer.encode(text)].sum() == len(text.encode())
    assert sizes[tokenizer.eod_id] == 0


def test_bytes_of_tokens_of_sentencepiece():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "<0xE8>", "<0xB5>", "<0xB0>", "a", "▁", "▁a", "ï"]
    backend = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert token_bytes(backend, len(pieces)).tolist()[1:] == [1, 1, 1, 1, 1, 2, 2]


EVEN: Documents = [[1, 2, 3, 4, EOD] for _ in range(8)]


def test_a_border_that_became_the_next_one_is_named_with_both_its_documents(tmp_path):
    path = datatrove(tmp_path / "file", [*EVEN[:2], [*EVEN[2], *EVEN[3]], [], *EVEN[4:]])
    assert slices(path)[0].misplaced.tolist() == [2, 3]


def test_the_document_before_a_slice_tells_whether_its_first_border_was_moved(tmp_path):
    moved = [*EVEN[:3], EVEN[3][:2], [*EVEN[3][2:], *EVEN[4]], *EVEN[5:]]
    before, after, _ = slices(datatrove(tmp_path / "file", moved), step=2 * (3 * 5 + 2))
    assert (len(before.ends), len(after.ends)) == (4, 3)
    assert after.misplaced.tolist() == [0]


@pytest.mark.parametrize("write", [megatron, datatrove])
def test_a_file_that_became_shorter_after_it_was_listed_is_cut_short(tmp_path, some, write):
    path = write(tmp_path / "file", some)
    [file] = list_files([str(path)])
    kind = token_kind(str(path), from_folder=False)
    assert kind is not None
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(SetAside, match="it is cut short"):
        read_tokens(Slice(file, 0, file.size), kind, VOCABULARY, EOD, {EOD: "<|endoftext|>"})
