import json
import os
import shutil

import pytest

from llmtrain.data.shards.checks import check_streams, check_vocabulary, data_fingerprint, epoch_samples
from llmtrain.data.shards.index import ShardError
from llmtrain.schema.data import DataConfig


def config(streams: dict, **options) -> DataConfig:
    return DataConfig.model_validate({"seq_len": 8, "train": {"streams": streams}, "num_canonical_nodes": 4} | options)


def said(data: DataConfig, batch: int = 8) -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in check_streams(data, batch)]


def test_good_shards_have_no_problem(tmp_path, write_shards):
    local = str(write_shards(tmp_path / "a", 20))
    assert said(config({"a": {"local": local}}, validation={"streams": {"v": {"local": local}}})) == []


def test_a_missing_folder_explains_how_to_make_it(tmp_path):
    [(path, message)] = said(config({"web": {"local": str(tmp_path / "none"), "split": "train"}}))
    assert path == "data.train.streams.web.local"
    assert "does not exist" in message and f"llmtrain prepare SOURCE... --out {tmp_path / 'none'}" in message


def test_every_problem_is_reported_at_once(tmp_path, write_shards):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/index.json").write_text("{}")
    streams = {
        "none": {"local": str(tmp_path / "none")},
        "long": {"local": str(write_shards(tmp_path / "long", 5, seq_len=16))},
        "bad": {"local": str(tmp_path / "bad")},
    }
    validation = {"streams": {"gone": {"local": str(tmp_path / "gone")}}}
    paths = [path for path, _ in said(config(streams, validation=validation))]
    assert paths == [f"data.train.streams.{name}.local" for name in streams] + ["data.validation.streams.gone.local"]


def test_a_shard_without_its_file_is_reported(tmp_path, write_shards):
    local = write_shards(tmp_path / "a", 20)
    lost, *others = sorted(path.name for path in local.glob("shard*"))
    (local / lost).unlink()
    data = config({"a": {"local": str(local)}})
    [(path, message)] = said(data)
    assert path == "data.train.streams.a.local"
    assert f"lacks 1 of {len(others) + 1} shards" in message and lost.partition(".mds")[0] in message
    remote = config({"a": {"local": str(local), "remote": "s3://bucket/a"}})
    assert said(remote) == []  # fetched again


@pytest.mark.parametrize("remote", ["s3://", "s3:", "s3:/b/a", "hf://"])
def test_a_remote_that_names_no_place_is_reported(tmp_path, remote):
    [(path, message)] = said(config({"a": {"local": str(tmp_path / "a"), "remote": remote}}))
    assert path == "data.train.streams.a.remote" and "names no place" in message


def test_another_sample_length_explains_what_to_set(tmp_path, write_shards):
    [(path, message)] = said(config({"a": {"local": str(write_shards(tmp_path / "a", 20, seq_len=16))}}))
    assert path == "data.train.streams.a.local"
    assert "samples of 16 tokens but data.seq_len is 8" in message and "data.seq_len: 16" in message


def test_a_larger_tokenizer_than_the_model_is_reported(tmp_path, write_shards):
    local = write_shards(tmp_path / "a" / "train", 20).parent
    data = config({"a": {"local": str(local), "split": "train"}})
    assert check_vocabulary(data, 10) == []  # shards of others: nothing is known
    (local / "manifest.json").write_text(json.dumps({"tokenizer": {"vocab_size": 300}}))
    assert check_vocabulary(data, 300) == []
    [problem] = check_vocabulary(data, 299)
    assert (problem.path, problem.found) == ("model.vocab_size", 299)
    assert f"{local} has 300 tokens; set model.vocab_size to 300 or more" in problem.message


def test_shards_without_tokens_and_twice_the_same_folder(tmp_path, write_shards):
    local = write_shards(tmp_path / "a", 20)
    [(path, message)] = said(config({"a": {"local": str(local)}, "b": {"local": str(local)}}))
    assert (path, "stream a too" in message) == ("data.train.streams.b.local", True)
    index = json.loads((local / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_names"] = ["image"]
    (local / "index.json").write_text(json.dumps(index))
    [(_, message)] = said(config({"a": {"local": str(local)}}))
    assert "no column 'tokens' (columns: image)" in message


def test_too_few_samples_for_a_batch_or_for_the_canonical_nodes(tmp_path, write_shards):
    data = config({"a": {"local": str(write_shards(tmp_path / "a", 20))}})
    assert said(data, 20) == []
    assert said(data, 21) == [("data.train", "20 samples are less than one global batch of 21")]
    [(path, message)] = said(data, 7)
    assert path == "data.num_canonical_nodes" and "multiples of 28 samples" in message


def test_remote_streams_and_shards_to_be_prepared_may_be_absent(tmp_path):
    remote = config({"a": {"local": str(tmp_path / "cache"), "remote": "s3://bucket/a"}})
    prepare = {"sources": ["stdlib"], "out": str(tmp_path / "out"), "vocab_size": 300, "seq_len": 8}
    assert said(remote) == said(config({}, train=None, prepare=prepare)) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_compressed_shards_need_a_writable_folder(tmp_path, write_shards):
    local = write_shards(tmp_path / "a", 20)
    local.chmod(0o500)
    [(_, message)] = said(config({"a": {"local": str(local)}}))
    assert "must be writable" in message


@pytest.mark.parametrize(
    ("samples", "batch", "nodes", "expected"),
    [(100, 8, 8, 96), (100, 6, 4, 96), (100, 1, 8, 96), (7, 8, 1, 0), (64, 64, 8, 64)],
)
def test_an_epoch_is_whole_batches_that_the_canonical_nodes_share(samples, batch, nodes, expected):
    assert epoch_samples(samples, batch, nodes) == expected


def test_the_fingerprint_follows_content_and_mixture_not_place(tmp_path, write_shards):
    a, b = (write_shards(tmp_path / name, size) for name, size in (("a", 20), ("b", 12)))
    streams = {"a": {"local": str(a), "proportion": 1.0}, "b": {"local": str(b), "proportion": 2.0}}
    first = data_fingerprint(config(streams))
    moved = shutil.move(a, tmp_path / "moved")
    streams["a"]["local"] = str(moved)
    assert data_fingerprint(config(streams)) == first
    assert data_fingerprint(config(dict(reversed(streams.items())))) != first
    streams["b"]["proportion"] = 3.0
    assert data_fingerprint(config(streams)) != first
    streams["a"]["local"] = str(write_shards(tmp_path / "longer", 21))
    streams["b"]["proportion"] = 2.0
    assert data_fingerprint(config(streams)) != first


def test_the_fingerprint_of_missing_shards_is_an_error(tmp_path):
    with pytest.raises(ShardError, match=r"holds no index.json"):
        data_fingerprint(config({"a": {"local": str(tmp_path)}}))
