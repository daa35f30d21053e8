"""The experts of docs/extending/feed-forward.md, as printed there, in models of this process."""

import importlib.util
import sys
from typing import Annotated, Any

import torch
from pydantic import Field

from llmtrain.config.base import ByType
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import AttentionBlock, Mamba2Block, ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.sections.dense import MLPSection
from tests.support.contributing import ROOT, parse
from tests.support.models import ATTENTION, MAMBA, ROTARY, VOCAB


def _load() -> list[Any]:
    """The page's modules, under the names of their files."""
    made = []
    for path, text in parse((ROOT / "docs/extending/feed-forward.md").read_text(encoding="utf-8")).files:
        name = path.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_loader(name, None)
        assert spec is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        exec(compile(text, path, "exec"), vars(module))
        made.append(module)
    return made


SECTION, LAYER = _load()
MLP = Annotated[MLPSection | SECTION.ExpertsSection, ByType("swiglu")]


class ExpertsAttentionBlock(AttentionBlock):
    mlp: MLP | None = None


class ExpertsMamba2Block(Mamba2Block):
    mlp: MLP | None = None


class ExpertsConfig(ModelConfig):
    blocks: dict[str, Annotated[ExpertsAttentionBlock | ExpertsMamba2Block, Field(discriminator="type")]]


def config(dropout: float = 0.0, **experts: Any) -> ExpertsConfig:
    """A layer of attention, one of Mamba-2 and one of dense MLPs; experts: settings of the first two's."""
    mlp = {"type": "experts", "d_ff": 24, **experts}
    blocks = {
        "a": ATTENTION | {"position": ROTARY, "mlp": mlp},
        "m": MAMBA | {"mlp": mlp},
        "d": ATTENTION | {"position": ROTARY},
    }
    settings = {"vocab_size": VOCAB, "d_model": 32, "max_seq_len": 300, "blocks": blocks, "layers": "a m d"}
    return ExpertsConfig.model_validate(settings | {"dropout": dropout})


def build(**experts: Any) -> CausalLM:
    """Such a model, of seed 5, with weights large enough that its routers tell tokens apart."""
    model = HybridLM(config(**experts), platform.cpu())
    model.init_weights(seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return CausalLM(model)
