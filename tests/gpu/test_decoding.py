"""Generation on a GPU: Triton's step kernels inside a recorded graph say what the full forward pass says."""

import pytest
import torch

from llmtrain.generate import decoding
from llmtrain.generate.sampling import Sampling
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from tests.support.models import MODELS, VOCAB, build
from tests.support.selection import cases

pytestmark = pytest.mark.gpu
NEW = 200
FEW = ("a window and soft caps", "zamba2 as the 1.2B")


@pytest.fixture(params=cases({name: name for name in MODELS}, *FEW), scope="module")
def model(request) -> CausalLM:
    return build(request.param, platform.detect())


def prompts() -> list[list[int]]:
    return [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 1, 20)]


def rows(model: CausalLM, options: Sampling = Sampling(temperature=0)) -> list[list[int]]:  # noqa: B008 (frozen)
    steps = decoding.decode(model, prompts(), options, max_new_tokens=NEW)
    return [[int(token or 0) for token in row] for row in zip(*steps, strict=True)]


def test_decoding_in_fp32_equals_the_full_forward(model):
    for prompt, new in zip(prompts(), rows(model), strict=True):
        with torch.no_grad():
            logits = model.logits(torch.tensor([prompt + new], device="cuda"))[0, len(prompt) - 1 : -1]
        # The likeliest token, or one that rounding cannot tell from it.
        chosen = logits.gather(1, torch.tensor(new, device="cuda")[:, None])[:, 0]
        assert (logits.max(dim=-1).values - chosen).max() < 1e-4


def test_a_recorded_graph_changes_nothing(model, monkeypatch):
    options = Sampling(seed=3, top_p=0.9, repetition_penalty=1.2)
    recorded = rows(model, options)
    init = decoding.DecodeStep.__init__

    def unrecorded(self, *args):
        init(self, *args)
        assert self.record
        self.record = False

    monkeypatch.setattr(decoding.DecodeStep, "__init__", unrecorded)
    assert rows(model, options) == recorded


@pytest.mark.parametrize("name", cases({name: name for name in MODELS}, FEW[1]))
def test_bf16_stays_close(name):
    """Not token by token: one rounding may turn a choice. The first logits after a long prompt, and 40 steps on."""
    model = build(name, platform.detect(), torch.bfloat16)
    model.hybrid.cast(torch.bfloat16)
    exact = build(name, platform.detect())
    ids = torch.randint(VOCAB, (2, 140), generator=torch.Generator().manual_seed(0), device="cpu").cuda()
    cache = model.empty_cache(2, 140)
    step = decoding.DecodeStep(model, cache, 40)
    with torch.no_grad():
        expected = exact.logits(ids)
        logits = [model.next_logits(ids[:, :100], cache)]
        logits += [step(ids[:, at]).clone() for at in range(100, 140)]
    worst = max(
        float((found.float() - expected[:, 99 + i]).norm() / expected[:, 99 + i].norm())
        for i, found in enumerate(logits)
    )
    assert worst < 0.1
