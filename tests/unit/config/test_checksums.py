import json

import pytest

from llmtrain.config import checksums
from llmtrain.config.checksums import DamagedError

RECORDS = [{}, {"a": 1}, {"text": "é \u2028 \ud800", "n": [0.1, None, {"xxh3_128": "x"}]}]


@pytest.mark.parametrize("content", RECORDS)
@pytest.mark.parametrize("encode", [checksums.encode_record, checksums.encode_json])
def test_reads_back_what_was_written_and_is_plain_json(content, encode):
    text = encode(content)
    assert checksums.decode(text) == (content, True)
    assert json.loads(text) == {**content, checksums.KEY: json.loads(text)[checksums.KEY]}


@pytest.mark.parametrize("encode", [checksums.encode_record, checksums.encode_json])
def test_no_byte_can_change_the_content_unseen(encode):
    content = {"document": 12, "answers": [-1.25, True]}
    text = encode(content)
    for at in range(len(text) - 1):
        for bit in (1, 4):
            changed = text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :]
            try:
                found, has_checksum = checksums.decode(changed)
            except DamagedError:
                continue
            assert not has_checksum  # the key itself is damaged: the content is not
            assert {name: found[name] for name in content} == content


def test_reads_what_was_written_before_there_were_checksums():
    assert checksums.decode(b'{"a": 1}') == ({"a": 1}, False)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_rejects_what_is_no_json_object(text):
    with pytest.raises(DamagedError):
        checksums.decode(text)


def test_names_damaged_and_cut_lines_and_returns_the_others(tmp_path):
    lines = [checksums.encode_record({"n": number}) for number in range(5)]
    lines[1] = lines[1].replace(b"1", b"7", 1)
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"n": -1}\n' + b"".join(lines) + b'{"n": 9}\n' + lines[0][:9])
    found = checksums.read_records(path)
    assert [record["n"] for record in found.records] == [-1, 0, 2, 3, 4]
    assert found.damaged == {3: "is not what was written (its xxh3_128 differs)", 7: "has no xxh3_128", 8: "is no JSON"}
