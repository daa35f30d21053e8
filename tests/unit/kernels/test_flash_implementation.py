"""FlashAttention-3 and -4 in the place of PyTorch's own: one of them per process, and never by `auto`."""

from types import ModuleType

import pytest
from torch.nn import attention

from llmtrain.errors import UserError
from llmtrain.kernels import refusals, registry
from llmtrain.kernels.attention.sdpa import SDPA
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.varlen import VarlenAttention
from llmtrain.kernels.platform import Platform

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)
B200 = Platform("nvidia", "sm100", "NVIDIA B200", 180 << 30)
A100 = Platform("nvidia", "sm80", "NVIDIA A100", 80 << 30)
SPEC = AttentionSpec(8, 2, 128, 0.1)


@pytest.fixture
def active(monkeypatch) -> list[str | None]:
    """What is active, last: a stand-in for PyTorch's registry, whose packages are not here."""
    now: list[str | None] = [None]
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: now[-1])
    monkeypatch.setattr(attention, "activate_flash_attention_impl", now.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: now.append(None))
    return now


def test_a_version_is_active_while_its_kernels_live(active):
    kernel = SDPA(SPEC, "flash4")
    again = SDPA(SPEC, "flash4")
    assert active == [None, "FA4"]
    with pytest.raises(UserError, match=r"FA2 and FA4 cannot stand in one process.*name one of sdpa:flash"):
        SDPA(SPEC, "flash")
    with pytest.raises(UserError, match="FA3 and FA4"):
        SDPA(SPEC, "flash3")
    with pytest.raises(UserError, match="FA2 and FA4"):
        VarlenAttention(SPEC)
    del kernel, again
    SDPA(SPEC, "flash")
    assert active == [None, "FA4", None]


def test_other_kernels_of_sdpa_stand_beside_any_version(active):
    kept = SDPA(SPEC, "flash3")
    for variant in ("cudnn", "efficient", "cpu"):
        SDPA(SPEC, variant)
    assert active == [None, "FA3"] and kept


@pytest.mark.parametrize(
    "name, where, head_dim, words",
    [
        ("sdpa:flash3", H200, 128, "flash_attn_interface is not installed"),
        ("sdpa:flash4", H200, 256, "flash_attn.cute is not installed: pip install flash-attn-4"),
        ("sdpa:flash3", B200, 128, "runs on Hopper (sm90) only, not sm100"),
        ("sdpa:flash4", A100, 128, "(sm90, sm100), not sm80"),
        ("sdpa:flash4", B200, 192, "a head_dim up to 128, or 256, on Blackwell, not 192"),
    ],
)
def test_it_gives_the_reason_it_cannot_serve(name, where, head_dim, words):
    reason = registry.refusal("attention", name, AttentionSpec(8, 2, head_dim, 0.1), where)
    assert reason is not None and words in reason


def test_neither_auto_nor_sdpa_means_it_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(refusals.importlib.util, "find_spec", ModuleType)
    assert registry.resolve("attention", "sdpa:flash4", SPEC, H200).name == "sdpa:flash4"
    for name in ("auto", "sdpa"):
        assert registry.resolve("attention", name, SPEC, H200).name in ("sdpa:cudnn", "sdpa:flash", "triton")
