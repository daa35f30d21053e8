from __future__ import annotations

import numpy as np
import pytest

from llmtrain.data.packing import bytes_per_token, is_held_out, pack, token_dtype
from llmtrain.data.tokenizer import train_bpe


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
    # Raising the fraction only adds to what is held out.
    assert all(is_held_out(name, 17, 0.2) for name, out in zip(names, held, strict=True) if out)


@pytest.mark.parametrize("text", ["plain ascii text", "naïve 走 \U0001f600 mixed", ""])
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
