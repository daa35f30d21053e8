"""Which attention has a backward pass by stored gradients of scores."""

from dataclasses import replace

import pytest
import torch

from llmtrain.kernels import tuning, tuning_table
from llmtrain.kernels.attention.triton_call import Call
from llmtrain.kernels.attention.triton_launch import StoredLaunch
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.tuning_table import Row

HOPPER = Platform("nvidia", "sm90", "", 1 << 36, 132)
LAUNCH = StoredLaunch(64, 128, 8, 2, rows=16384, keys=4096, queries=32768, from_seq_len=2048)


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A row of one's own for plain attention at head_dim 200, which no table has."""
    row = Row("attention.dscores", "bfloat16", (200,), LAUNCH, 1, "compiled only", None, "plain")
    tuning_table.save(tmp_path / "own.yaml", "sm90", [row])
    monkeypatch.setenv("LLMTRAIN_TUNING", str(tmp_path / "own.yaml"))
    tuning.forget()
    yield
    monkeypatch.undo()
    tuning.forget()


def stored(
    seq_len: int = 4096,
    head_dim: int = 200,
    where: Platform = HOPPER,
    n_heads: int = 16,
    n_kv: int | None = None,
    **features,
):
    q = torch.empty(1, seq_len, n_heads, head_dim, device="meta", dtype=features.pop("dtype", torch.bfloat16))
    for name in ("slopes", "starts", "ends"):
        if features.pop(name, False):
            features[name] = torch.empty(
                (n_heads,) if name == "slopes" else (1, seq_len), device="meta", dtype=torch.int32
            )
    return Call(q, q[:, :, :n_kv], q[:, :, :n_kv], 0.1, platform=where, **features)._stored(q)


def test_from_the_length_of_its_row_on():
    assert stored() == stored(2048) == stored(causal=False) == stored(window=4096) == LAUNCH
    assert stored(1024) is None


@pytest.mark.parametrize(
    "other",
    [{"head_dim": 128}, {"dtype": torch.float16}, {"slopes": True}, {"softcap": 9.0}, {"window": 100}, {"n_kv": 4}],
    ids=str,
)
def test_only_what_its_row_names(other):
    assert stored(**{"seq_len": 2048, **other}) is None


def test_sequences_of_whole_tiles():
    assert stored(4096 + 64) is None and stored(4096 + 128) == LAUNCH


def test_heads_that_fill_the_device():
    """Programs are tiles of 128 keys of one head, of 1,024 keys here: 15 heads make up 120 for 132 multiprocessors."""
    assert stored(n_heads=15) == LAUNCH and stored(n_heads=14) is None


def test_values_of_another_width_have_a_row_of_their_own(tmp_path):
    def of_values(width: int) -> StoredLaunch | None:
        q = torch.empty(1, 4096, 16, 200, device="meta", dtype=torch.bfloat16)
        made = Call(q, q, q[..., :width], 0.1, platform=HOPPER)
        return made._stored(made.v)

    assert of_values(200) == LAUNCH and of_values(64) is None
    row = Row("attention.dscores", "bfloat16", (200,), LAUNCH, 1, "compiled only", None, "plain, values 64")
    tuning_table.save(tmp_path / "own.yaml", "sm90", [row])
    tuning.forget()
    assert of_values(64) == LAUNCH and of_values(96) is None


def test_documents_have_the_other_kernels():
    assert stored(starts=True, ends=True) is None


def test_an_architecture_does_not_borrow_the_row_of_another(tmp_path, monkeypatch):
    """Unlike a tile that is known to fit, which of two ways is the faster one was measured on one GPU alone."""
    monkeypatch.delenv("LLMTRAIN_TUNING")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    tuning.forget()
    assert stored(16384, 160) is not None
    assert stored(16384, 160, replace(HOPPER, arch="sm103")) is None
    assert stored(16384, 160, Platform("amd", "gfx942", "", 1 << 36, 304)) is None
