"""The tokenizer of a folder that is made: trained once, whatever interrupts the rest, and anew for other settings."""

import pytest

from llmtrain.data.partitions import folder_maker
from llmtrain.data.prepare import prepare
from llmtrain.data.sources.files import PrepareError
from tests.support.prepared import small


def test_a_tokenizer_that_was_trained_before_an_interruption_is_taken_for_the_same_settings_alone(
    tmp_path, monkeypatch
):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 50)
    trained, train = [], folder_maker.train_tokenizer

    def counted(corpora):
        trained.append(corpora)
        return train(corpora)

    def interrupted(*_):
        raise PrepareError("interrupted")

    monkeypatch.setattr(folder_maker, "train_tokenizer", counted)
    settings = small(tmp_path, tmp_path / "text.txt", tokenizer=None, vocab_size=270)
    with monkeypatch.context() as patched:
        patched.setattr(folder_maker, "make_partitions", interrupted)
        with pytest.raises(PrepareError, match="interrupted"):
            prepare(settings, progress=False)
    prepare(settings, progress=False)
    assert len(trained) == 1
    with monkeypatch.context() as patched:
        patched.setattr(folder_maker, "make_partitions", interrupted)
        with pytest.raises(PrepareError, match="interrupted"):
            prepare(settings.model_copy(update={"out": f"{settings.out}-2"}), progress=False)
    made = prepare(settings.model_copy(update={"out": f"{settings.out}-2", "vocab_size": 280}), progress=False)
    assert len(trained) == 3 and made.manifest["tokenizer"]["vocab_size"] == 280
