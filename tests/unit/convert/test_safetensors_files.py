"""Files written piece by piece are files of the safetensors library."""

import pytest
import torch
from safetensors import safe_open

from llmtrain.checkpoint.format.manifest import hash_file
from llmtrain.checkpoint.format.tensor_file import DTYPES, Entry, TensorFile, split_into_files
from llmtrain.commands.convert import parse_size
from llmtrain.convert.export import safetensors_names


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_the_library_reads_what_was_appended(tmp_path, dtype, piece):
    tensors = {
        "a.weight": torch.randn(5, 7).to(dtype),
        "é": torch.randn(3).to(dtype),
        "scalar": torch.randn(()).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "conv": torch.randn(4, 1, 3).to(dtype),
    }
    entries = [Entry(name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    path = tmp_path / "model.safetensors"
    with TensorFile(path, entries, {"format": "pt"}) as file:
        for tensor in tensors.values():
            for some in tensor.reshape(-1).split(piece):
                file.append(some)
    assert file.record == {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
    assert (int.from_bytes(path.read_bytes()[:8], "little") + 8) % 8 == 0
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = opened.get_tensor(name)
            assert found.dtype == dtype and torch.equal(found.double(), tensor.double())  # of float8 there is no equal


def test_a_file_that_lacks_data_is_a_mistake_of_ours(tmp_path):
    with (
        pytest.raises(AssertionError, match="4 bytes are missing"),
        TensorFile(tmp_path / "x", [Entry("a", torch.float32, (2,))], {}) as file,
    ):
        file.append(torch.ones(1))


def entry(name: str, size: int) -> Entry:
    return Entry(name, torch.float16, (size // 2,))


def test_files_are_filled_in_order_up_to_the_limit():
    entries = [entry("a", 60), entry("b", 40), entry("c", 2), entry("d", 300), entry("e", 2)]
    assert [[e.name for e in file] for file in split_into_files(entries, 100)] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert len(split_into_files(entries, 10**9)) == 1


def test_files_have_the_names_that_transformers_gives():
    assert safetensors_names(1) == ["model.safetensors"]
    assert safetensors_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8), ("500_000", 500_000), ("1B", 1), ("2KiB", 2048)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 PB", "-5GB", "0GB", "5GBs", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="expected a size such as 5GB"):
        parse_size(text)
