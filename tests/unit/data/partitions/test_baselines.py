import lzma
import math

import numpy as np
import pytest
from streaming import StreamingDataset

from llmtrain.data.partitions.baselines import read_baselines, unigram_bits_per_byte, xz_bits_per_byte
from llmtrain.data.prepare import PrepareError, prepare
from llmtrain.data.shards.split_writer import SplitWriter
from llmtrain.data.tokenize.stored_tokenizer import load_run_tokenizer
from llmtrain.schema.load import load_config
from llmtrain.train.report import summary


def test_unigram_is_the_cross_entropy_of_add_one_smoothed_counts():
    train, held_out = np.array([6, 2, 0]), np.array([1, 2, 1])
    expected = -(math.log2(7 / 11) + 2 * math.log2(3 / 11) + math.log2(1 / 11))
    assert unigram_bits_per_byte(train, held_out, 10) == pytest.approx(expected / 10)


@pytest.mark.parametrize(("held_out", "counted"), [(True, [2, 3, 4, 6, 7, 8]), (False, range(1, 9))])
def test_counts_of_held_out_text_are_of_scored_tokens(tmp_path, held_out, counted):
    writer = SplitWriter(tmp_path, "shard", 4, 10, held_out)
    sizes = np.ones(8 * held_out, np.int64)
    writer.add(np.arange(1, 9, dtype=writer.dtype), sizes, np.array([8]), np.array([True]), 8)
    writer.finish()
    assert writer.counts.tolist() == np.bincount(counted, minlength=10).tolist()


def test_unigram_of_uniform_bytes_is_eight_bits():
    counts = np.full(256, 1000)
    assert unigram_bits_per_byte(counts, counts, int(counts.sum())) == pytest.approx(8)


def test_xz_is_the_size_of_the_compressed_text(make_text):
    text = make_text(1, 5000).encode()
    assert xz_bits_per_byte(text) == 8 * len(lzma.compress(text, preset=9)) / len(text)
    assert xz_bits_per_byte(b"a" * 100_000) < 0.1 < 7.9 < xz_bits_per_byte(np.random.default_rng(0).bytes(100_000))


def test_no_text_is_an_error():
    with pytest.raises(ValueError):
        xz_bits_per_byte(b"")
    with pytest.raises(ValueError):
        unigram_bits_per_byte(np.ones(3, int), np.ones(3, int), 0)


def test_a_prepared_folder_carries_both(corpus, settings, tmp_path):
    out = prepare(settings(corpus), progress=False).out
    baselines = read_baselines(out)
    assert baselines.xz is not None and baselines.unigram is not None
    assert 0.5 < baselines.xz < 8 and 0.5 < baselines.unigram < 8
    none = prepare(settings(corpus, validation_fraction=0.0, out=str(tmp_path / "none")), progress=False).out
    assert read_baselines(none).xz is None and read_baselines(none).unigram is None
    with pytest.raises(PrepareError, match="not a folder made by"):
        read_baselines(tmp_path)


def test_xz_reads_the_samples_that_the_model_was_validated_on(corpus, settings):
    """Not all of the held-out text, where the run validates on a part of its samples."""
    out = prepare(settings(corpus), progress=False).out
    changes = ["model.vocab_size=300", "data.seq_len=32", f"data.prepare.out={out}"]

    def baselines(samples: int | None) -> dict[str, float | None]:
        return summary._baselines(
            load_config("quickstart", [*changes, f"eval.max_samples={samples or 'null'}"]), str(out)
        )

    of_all = read_baselines(out)
    everything = {"xz -9": of_all.xz, "a unigram model over the same tokens": of_all.unigram}
    assert baselines(None) == baselines(10_000) == everything
    [(label, found)] = baselines(3).items()
    samples = StreamingDataset(local=f"{out}/validation", shuffle=False, batch_size=1)
    chosen = [samples[i * len(samples) // 3]["tokens"] for i in range(3)]
    tokenizer = load_run_tokenizer(load_config("quickstart", changes).data.model_dump(mode="json"))
    text = "".join(tokenizer.decode(tokens.tolist()) for tokens in chosen)
    assert (label, found) == ("xz -9 of the same 3 samples", xz_bits_per_byte(text.encode()))
