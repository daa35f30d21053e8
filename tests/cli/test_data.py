"""llmtrain data show, stats, seen and verify, on a prepared folder, a YAML and a run."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from llmtrain.data.partitions import cutting as partitions
from llmtrain.data.prepare import prepare
from llmtrain.data.shards.checks import data_fingerprint
from llmtrain.schema.config import Config
from llmtrain.schema.data import PrepareConfig
from tests.support.chats import conversations, prepare_chats
from tests.support.project import LLMTRAIN
from tests.support.stores import flip, make_checkpoint
from tests.support.tiny import GLOBAL_BATCH, SEQ_LEN, tiny_settings

Command = Callable[..., tuple[int, str, str]]
WORDS = "the quick brown fox jumps over a lazy dog".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Prepared data of two sources: 40 texts and 60 records."""
    root, rng = tmp_path_factory.mktemp("corpus"), random.Random(0)

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(10, 90)))

    (root / "texts").mkdir()
    for number in range(40):
        (root / f"texts/{number:02}.txt").write_text(text())
    (root / "more.jsonl").write_text("".join(json.dumps({"text": text()}) + "\n" for _ in range(60)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions, "PARTITION_BYTES", 10_000)
        return prepare(made_of(root), progress=False).out


def made_of(root: Path, **options: Any) -> PrepareConfig:
    """Settings that prepare the sources in this folder."""
    usual = {
        "sources": [str(root / "texts"), str(root / "more.jsonl")],
        "out": str(root / "data"),
        "vocab_size": 280,
        "seq_len": SEQ_LEN,
        "validation_fraction": 0.2,
        "workers": 1,
    }
    return PrepareConfig.model_validate(usual | options)


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made, tmp_path / "data"))


@pytest.fixture
def run(made, tmp_path) -> Path:
    """The folder of a run that has a checkpoint at step 20."""
    settings = tiny_settings(made, tmp_path / "run")
    config = Config.model_validate_json(json.dumps(settings))
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    position = {"epoch": 1, "sample_in_epoch": 0, "num_canonical_nodes": 8, "shuffle_seed": 9176, "order": "streaming"}
    data = {"position": position, "fingerprint": data_fingerprint(config.data)}
    make_checkpoint(tmp_path / "run/checkpoints", 20, config=config.model_dump(mode="json"), data=data)
    return tmp_path / "run"


@pytest.fixture
def command(capsys) -> Command:
    """command("stats", …): (exit status, standard output, standard error) of `llmtrain data`."""

    def call(*words: Any) -> tuple[int, str, str]:
        status = main(["data", *map(str, words)])
        found = capsys.readouterr()
        return status, found.out, found.err

    return call


def test_samples_are_shown_with_the_borders_of_their_documents(command, made):
    status, text, _ = command("show", made, "--ids", "0,5:6")
    assert status == 0 and text.count("━━ sample") == 3 and "\x1b" not in text
    assert "━━ sample 0 of train (" in text and f": {SEQ_LEN} tokens, " in text
    assert "<|endoftext|>" in command("show", made, "--ids", "0:9")[1]
    first = text.split("━━")[1].splitlines()
    source = made.parent / "texts" / first[1].split("texts/")[1].split(",")[0]
    assert first[2] in source.read_text()
    assert command("show", made, "--split", "validation")[1].count("━━ sample") == 3


@pytest.mark.parametrize("recorded", [True, False])
def test_trained_tokens_of_conversations_are_shown_apart(command, tmp_path, monkeypatch, recorded):
    out = prepare_chats(tmp_path, "padded", count=30)
    if not recorded:
        shutil.rmtree(out / "partitions")
        (out / "manifest.json").unlink()
    [turns, *_] = conversations(30)
    status, text, _ = command("show", out / "train", "--ids", "0")
    sample = text.split("━━")[1]
    answers = "".join(f"<|im_start|>{turn['role']}\n" + ("⟦{}<|im_end|>⟧\n" if turn["role"] == "assistant" else
        "{}<|im_end|>\n").format(turn["content"]) for turn in turns)  # fmt: skip
    assert status == 0 and answers in sample and "1 document, " in sample and " of padding, " in sample
    assert " trained" in sample.splitlines()[0] and "── padding: tokens" in sample
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    coloured = command("show", out / "train", "--ids", "0")[1]
    assert f"\x1b[32m{turns[-1]['content']}<|im_end|>\x1b[0m" in coloured and "⟦" not in coloured


def test_what_steers_a_terminal_is_shown_as_numbers(command, tmp_path):
    (tmp_path / "a.txt").write_text("before \x1b[31m red \x07\n" * 100)
    prepare(
        PrepareConfig(
            sources=[str(tmp_path / "a.txt")],
            out=str(tmp_path / "out"),
            vocab_size=257,
            seq_len=64,
            validation_fraction=0,
        ),
        progress=False,
    )
    status, text, _ = command("show", tmp_path / "out", "--ids", "0")
    assert status == 0 and "\x1b" not in text and "before \\x1b[31m red \\x07" in text


def test_the_batch_of_a_step_is_the_one_that_the_run_takes(command, run):
    shown = command("show", run, "--step", "3")[1]
    seen = [json.loads(line) for line in command("seen", run, "--steps", "3", "--json")[1].splitlines()]
    assert shown.count("━━ sample") == len(seen) == GLOBAL_BATCH
    for sample in seen:
        assert (
            f"━━ sample {sample['sample']} of step 3" in shown and f"{sample['shard']}, row {sample['row']})" in shown
        )


def test_statistics_of_each_source(command, made, tmp_path):
    status, text, _ = command("stats", made, "--json", "--out", tmp_path / "pictures")
    assert status == 0
    found = json.loads(text)
    manifest = json.loads((made / "manifest.json").read_text())["splits"]
    for split in ("train", "validation"):
        texts, records = found[split]
        assert texts["name"].endswith("texts") and records["name"].endswith("more.jsonl")
        for name, total in (("documents", "documents"), ("tokens", "tokens"), ("text_bytes", "bytes")):
            assert texts[name] + records[name] == manifest[split][total]
        assert texts["stored_tokens"] + records["stored_tokens"] == manifest[split]["samples"] * SEQ_LEN
        assert 1 < texts["bytes_per_token"] < 8
        lengths = texts["tokens_per_document"]
        assert lengths["shortest"] <= lengths["1%"] <= lengths["50%"] <= lengths["99%"] <= lengths["longest"]
        assert lengths["mean"] * texts["documents"] == pytest.approx(texts["tokens"])
        assert 0 < texts["special_tokens"]["<|endoftext|>"] < 0.2
        assert texts["most_frequent"][0]["share"] >= texts["most_frequent"][1]["share"]
        for kind in ("lengths", "tokens"):
            assert (tmp_path / f"pictures/{split}-{kind}.png").read_bytes().startswith(b"\x89PNG")
    table = command("stats", made, "--split", "train", "--top", "3")[1]
    assert "bytes/token" in table and "most frequent: " in table and "validation" not in table


def test_statistics_without_a_record_of_the_documents_are_of_all(command, folder):
    (folder / "partitions/sources").unlink()
    [found] = json.loads(command("stats", folder, "--split", "train", "--json")[1])["train"]
    counts = json.loads((folder / "manifest.json").read_text())["splits"]["train"]
    assert (found["documents"], found["tokens"], found["text_bytes"]) == tuple(
        counts[name] for name in ("documents", "tokens", "bytes")
    )
    assert found["tokens_per_document"]["longest"] > 20
    (folder / "manifest.json").unlink()
    shutil.rmtree(folder / "tokenizer")
    status, text, said = command("stats", folder / "train", "--json")
    assert status == 0 and "no tokenizer/ beside" in said
    assert json.loads(text)["train"][0]["documents"] is None


def test_the_documents_of_steps_are_named_and_the_shares_drawn(command, run, tmp_path):
    status, text, said = command("seen", run, "--steps", "2:25", "--out", tmp_path / "shares.png")
    lines = text.splitlines()
    assert status == 0 and "newest checkpoint" in said and "of step 20: later steps are those to come" in said
    assert lines[0].startswith("text: 100.0 % of the samples, 192 of 192, ")
    assert len(lines) == 1 + 24 * GLOBAL_BATCH
    assert all(("texts/" in line or "more.jsonl:" in line) and line.startswith("step ") for line in lines[1:])
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")
    assert command("seen", run, "--steps", "2:25", "--shares")[1].splitlines() == lines[:1]
    assert command("seen", tmp_path / "run.yaml", "--steps", "2:25")[1] == text
    one = json.loads(command("seen", run, "--steps", "7", "--json")[1].splitlines()[0])
    assert one["step"] == 7 and one["documents"][0]["tokens"][0] == 0 and one["documents"][-1]["tokens"][1] == SEQ_LEN


def test_shards_that_changed_since_the_run_are_reported(command, run, tmp_path, folder):
    index = json.loads((folder / "train/index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"]["xxh64"] = "0" * 16
    (folder / "train/index.json").write_text(json.dumps(index))
    checkpoint = run / "checkpoints/step-00000020"
    settings = tiny_settings(folder, run)
    config = Config.model_validate_json(json.dumps(settings)).model_dump(mode="json")
    shutil.rmtree(checkpoint)
    data = {"position": {"order": "streaming"}, "fingerprint": "another"}
    make_checkpoint(run / "checkpoints", 20, config=config, data=data)
    status, _, said = command("seen", run, "--steps", "1")
    assert status == 2 and "are not those that" in said


def test_verify_names_every_file_that_is_wrong_and_writes_nothing(command, folder):
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    status, text, errors = command("verify", folder)
    assert status == 0 and text.count(": good (") == 2 and errors == ""
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
    shards = sorted((folder / "train").glob("*.mds"))
    flip(shards[0])
    shards[1].rename(folder / "train/other.00000.mds")
    (folder / "tokenizer/tokenizer.json").write_text("{}")
    rests, sidecar, *_ = sorted((folder / "partitions").glob("*.documents"), key=lambda path: path.name[0] != "r")
    rests.write_bytes(rests.read_bytes()[:-30])
    sidecar.unlink()
    status, text, _ = command("verify", folder)
    wrong = [line for line in text.splitlines() if line.startswith("WRONG: ")]
    assert status == 1 and len(wrong) == 6
    for name, why in (
        (shards[0].name, "its xxh64 is not the one in the index"),
        (shards[1].name, "missing"),
        ("other.00000.mds", "is not in the index"),
        ("tokenizer.json", "is not the one that manifest.json names"),
        (sidecar.name, "missing"),
    ):
        assert any(f"{name}: {why}" in line for line in wrong), (name, wrong)
    assert f"{rests} is damaged: " in text


def test_verify_compares_unpacked_shards_and_counts(command, made, tmp_path):
    """Of shards that zstd packed."""
    folder = tmp_path / "packed"
    prepare(made_of(made.parent, out=str(folder), compression="zstd"), progress=False)
    index = json.loads((folder / "validation/index.json").read_text())
    shard = index["shards"][0]
    (folder / "validation" / shard["raw_data"]["basename"]).write_bytes(b"x" * shard["raw_data"]["bytes"])
    shard["samples"] -= 1
    (folder / "validation/index.json").write_text(json.dumps(index))
    status, text, _ = command("verify", folder)
    assert status == 1
    assert "samples; the index says" in text and "one of them was changed" in text


def test_the_folder_of_several_streams_is_looked_into_as_one(command, made, tmp_path):
    for name in ("web", "code"):
        shutil.copytree(made, tmp_path / "streams" / name)
    streams = tmp_path / "streams"
    assert "sample 0 of code" in command("show", streams, "--ids", "0")[1]
    assert "sample 0 of web" in command("show", streams, "--ids", "0", "--stream", "web")[1]
    names = [one["name"].split(":")[0] for one in json.loads(command("stats", streams, "--json")[1])["train"]]
    assert names == ["code", "code", "web", "web"]
    status, text, _ = command("verify", streams)
    assert status == 0 and text.count(": good (") == 4
    flip(next((streams / "web/validation").glob("*.mds")))
    shutil.rmtree(streams / "code/validation")
    status, text, _ = command("verify", streams)
    wrong = [line for line in text.splitlines() if line.startswith("WRONG: ")]
    assert status == 1 and len(wrong) == 2
    assert f"{streams}/web/validation/" in wrong[0] and f"{streams}/code/validation/index.json: missing" in wrong[1]
    (streams / "web/manifest.json").write_text("{")
    status, text, _ = command("verify", streams)
    assert status == 1 and f"WRONG: {streams}/web/manifest.json: " in text and f"{streams}/code/validation" in text
    status, _, said = command("verify", tmp_path)
    assert status == 2 and "of one stream or of several" in said


def test_verify_goes_on_behind_a_damaged_index(command, made, tmp_path, monkeypatch):
    for name in ("code", "web"):
        shutil.copytree(made, tmp_path / "streams" / name)
    monkeypatch.chdir(tmp_path)
    flip(next((tmp_path / "streams/web/train").glob("*.mds")))
    for split in ("train", "validation"):
        (tmp_path / "streams/code" / split / "index.json").write_text('{"version": 2')
    status, text, _ = command("verify", "./streams")
    wrong = [line for line in text.splitlines() if line.startswith("WRONG: ")]
    assert status == 1 and len(wrong) == 3 and "streams/web/validation: good (" in text
    assert all(f"streams/code/{split}/index.json is not the index" in text for split in ("train", "validation"))
    assert any("streams/web/train/" in line and "xxh64" in line for line in wrong)
    status, text, _ = command("verify", "./streams/code")
    assert status == 1 and text.count("WRONG: ") == 2 and "missing" not in text
    status, _, said = command("show", "streams")
    assert status == 2 and "is not the index" in said


def test_a_reader_that_leaves_early_is_no_fault(made):
    command = [*LLMTRAIN, "data", "show", str(made), "--ids", "0:40"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


def test_file_names_of_any_bytes_are_printed(command, tmp_path):
    name = os.fsdecode(b"na\xefve\x1b[31m.txt")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_text("the quick brown fox " * 30)
    config = PrepareConfig(
        sources=[str(tmp_path / "texts")], out=str(tmp_path / "out"), vocab_size=257, seq_len=64, validation_fraction=0
    )
    prepare(config, progress=False)
    status, text, _ = command("show", tmp_path / "out", "--ids", "1")
    assert status == 0 and "na\\udcefve\\x1b[31m.txt" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "{made}", "--ids", "99999"], "there is no 99,999"),
        (["show", "{made}", "--step", "3"], "--step is of a run"),
        (["show", "{made}", "--stream", "x"], "there is no stream x; there is train"),
        (["show", "{made}", "a.b=c"], "settings are replaced in a YAML alone"),
        (["show", "{made}/tokenizer"], "it holds no index.json of shards"),
        (["verify", "nowhere"], "nowhere"),
        (["seen", "{made}", "--steps", "1"], "is a folder"),
        (["seen", "nowhere.yaml", "--steps", "1"], "nowhere.yaml"),
    ],
)
def test_requests_that_are_wrong(command, made, words, said):
    status, _, error = command(*(word.format(made=made) for word in words))
    assert status == 2 and said in error


@pytest.mark.parametrize("words", [["--steps", "0:3"], ["--steps", "5:3"], ["--steps", "x"], []])
def test_steps_that_are_none(made, words):
    with pytest.raises(SystemExit, match="2"):
        main(["data", "seen", str(made), *words])
