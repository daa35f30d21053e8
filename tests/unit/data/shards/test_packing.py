import numpy as np
import pytest

from llmtrain.data.shards import best_fit as best_fit_module
from llmtrain.data.shards.best_fit import BestFitPacker, best_fit
from llmtrain.data.shards.packing import are_held_out, bytes_per_token, document_ends, is_held_out, pack, token_dtype
from llmtrain.data.tokenize.tokenizer import train_bpe


def test_pack_is_the_same_however_the_stream_is_cut():
    stream = np.arange(103, dtype=np.uint16)
    rest, rows = np.zeros(0, np.uint16), []
    for part in np.split(stream, [1, 1, 30, 31, 90]):
        samples, rest = pack(rest, part, 10)
        rows.append(samples)
    assert np.concatenate(rows).tolist() == stream[:100].reshape(10, 10).tolist()
    assert rest.tolist() == [100, 101, 102]
    assert rest.dtype == np.uint16


def test_held_out_share_is_the_fraction_and_depends_on_seed_and_name_only():
    names = [f"file{i}.py" for i in range(4000)]
    held = [is_held_out(name, 17, 0.1) for name in names]
    assert 0.08 < np.mean(held) < 0.12
    assert held == [is_held_out(name, 17, 0.1) for name in names]
    assert held != [is_held_out(name, 18, 0.1) for name in names]
    assert not any(is_held_out(name, 17, 0.0) for name in names)
    assert are_held_out("naïve \udc80", range(999), 17, 0.1) == [
        is_held_out(f"naïve \udc80@{n}", 17, 0.1) for n in range(999)
    ]
    # Raising the fraction only adds to what is held out.
    assert all(is_held_out(name, 17, 0.2) for name, out in zip(names, held, strict=True) if out)


@pytest.mark.parametrize("text", ["plain text", "naïve 走 \U0001f600", "\x7f\x80\u07ff\u0800\uffff\U00010000", ""])
def test_bytes_per_token_add_up_to_the_text(text):
    tokenizer = train_bpe(["plain text"], 257)
    encoding = tokenizer.backend.encode(text)
    sizes = bytes_per_token(text, encoding.offsets)
    assert len(sizes) == len(encoding.ids) + 1
    assert sizes.sum() == len(text.encode())
    assert sizes[-1] == 0
    assert (sizes >= 0).all()


def test_bytes_no_token_covers_come_last():
    assert bytes_per_token("ab é ", [(0, 2)]).tolist() == [2, 4]


def test_token_dtype_holds_every_id():
    assert token_dtype(65536) == "uint16" and np.iinfo("uint16").max == 65535
    assert token_dtype(65537) == "uint32"


@pytest.mark.parametrize("seed", range(6))
def test_best_fit_puts_every_item_into_one_bin_that_holds_it(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 300))
    lengths = rng.integers(1, size + 1, int(rng.integers(0, 400)))
    bins = best_fit(lengths, size)
    assert sorted(item for one in bins for item in one) == list(range(len(lengths)))
    fills = [int(lengths[one].sum()) for one in bins]
    assert max(fills, default=0) <= size
    # No item of the last bin would have fitted into an earlier one; so at most half is lost.
    assert len(bins) <= 2 * -(-int(lengths.sum()) // size)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [1, 500, 1 << 24])
def test_documents_lie_whole_in_samples_where_the_layout_states(seed, window, monkeypatch):
    """Documents in pieces, short and longer than a sample; any window."""
    monkeypatch.setattr(best_fit_module, "WINDOW_TOKENS", window)
    rng = np.random.default_rng(seed)
    documents = [np.append(rng.integers(1, 1000, int(n)), 0) for n in rng.integers(0, 90, 60)]
    packer = BestFitPacker(32, 0, "uint16", has_bytes=True)
    found = []
    for document in documents:
        cut = int(rng.integers(0, len(document)))
        for piece, end in ((document[:cut], False), (document[cut:], True)):
            made = packer.add(piece.astype(np.uint16), piece * 3, np.array([len(piece)]), np.array([end]))
            found += [made] if made else []
    found.append(packer.finish())
    rows, sizes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    assert (sizes == rows.astype(np.int64) * 3).all()
    layout = packer.layout()
    assert layout.tokens.sum() == rows.size and (layout.tokens > 0).all()
    flat, seen = rows.ravel(), [{} for _ in documents]
    for number, begin, tokens, end in zip(layout.documents, layout.begins, layout.tokens, layout.ends, strict=True):
        part = flat[end - tokens : end]
        if number < 0:
            assert not part.any()
        else:
            assert begin % 32 == 0 and (begin + tokens == len(documents[number]) or tokens == 32)
            seen[number][begin] = part.tolist()
    joined = [[token for _, part in sorted(parts.items()) for token in part] for parts in seen]
    assert joined == [document.tolist() for document in documents]
    assert packer.padding == rows.size - sum(map(len, documents)) == layout.tokens[layout.documents < 0].sum()


def test_best_fit_takes_the_fullest_bin_that_an_item_fits():
    """Rooms of 4, 3 and 2 are left for the 2, which fills the last; the 1 then goes where least is left."""
    assert best_fit(np.array([6, 7, 8, 2, 1]), 10) == [[2, 3], [1, 4], [0]]


def test_best_fit_of_many_documents_pads_less_than_a_hundredth():
    lengths = np.random.default_rng(1).lognormal(6, 1.2, 20_000).astype(np.int64) + 1  # median 400 tokens
    packer = BestFitPacker(2048, 0, "uint16", has_bytes=False)
    packer.add(np.ones(lengths.sum(), np.uint16), np.zeros(0, np.int64), lengths, np.ones(len(lengths), bool))
    rows, _ = packer.finish()
    assert packer.padding < 0.01 * rows.size


def test_a_document_that_the_partition_cuts_is_closed():
    packer = BestFitPacker(4, 9, "uint16", has_bytes=False)
    packer.add(np.arange(1, 6, dtype=np.uint16), np.zeros(0, np.int64), np.array([5]), np.array([False]))
    assert packer.finish()[0].tolist() == [[1, 2, 3, 4], [5, 9, 9, 9]]


def test_a_lone_end_closes_a_document_though_documents_begin_with_it_too():
    assert document_ends(np.array([0, 5, 0, 6, 0, 0, 7]), 0, True).tolist() == [
        False,
        False,
        True,
        False,
        True,
        False,
        False,
    ]
