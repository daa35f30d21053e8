"""The cells of the grid, in order of value: what a run that is cut short has measured is what most models run.

First every block of the shipped YAMLs and of published models, then each head_dim with each feature and grouping, then
other lengths. About 16,384 tokens a cell.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from llmtrain.bench.kernels.cell import Cell, cell
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.operation import Shape, operation
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.ssd.spec import SSDSpec

TOKENS = 16384
YAMLS = Path(__file__).parents[3] / "yamls"
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 224, 256)
FEATURES: tuple[dict[str, Any], ...] = (
    *({}, {"sliding_window": 1024}, {"documents": True}, {"documents": True, "sliding_window": 1024}),
    *({"alibi_max_bias": 8.0}, {"softcap": 30.0}),
)
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))


def attention() -> list[Shape]:
    """Every shape once. Sinks, and values of another width than keys, are no part of a cell."""
    shipped = [shape for shape in _shipped() if not shape.spec.sinks and shape.spec.value_dim is None]
    found = [*shipped, *(_shape(*one) for model in PUBLISHED["attention"].values() for one in model)]
    for features in FEATURES:
        for head_dim in HEAD_DIMS:
            heads = max(8, 2048 // head_dim // 8 * 8)
            found.append(_shape(heads, heads, head_dim, 4096, features))
            found.append(_shape(heads, heads // 4, head_dim, 4096, features))
    for features in FEATURES:
        found += [_shape(heads, kv, 128, 4096, features) for heads, kv in ((16, 1), (16, 2), (64, 4), (32, 16))]
        found += [_shape(heads, kv, 64, 4096, features) for heads, kv in ((32, 1), (64, 8))]
    found += [_shape(*heads, 256, 4096, features) for features in FEATURES[:3] for heads in ((8, 1), (8, 4))]
    for seq_len in (1024, 32768, 2048, 16384, 8192):
        for features in (FEATURES[0], FEATURES[1], FEATURES[2], FEATURES[4]):
            found += [_shape(32, 8, 128, seq_len, features), _shape(32, 32, 64, seq_len, features)]
        found += [_shape(8, 4, 256, seq_len, features) for features in FEATURES[:2]]
    return list(dict.fromkeys(found))


def drawn_attention(count: int, seed: int) -> list[Shape]:
    """Shapes that no list names, most of lengths that are whole tiles."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        head_dim = draw.choice((48, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 224, 256))
        kv_heads, group = draw.choice((1, 1, 2, 2, 3, 4, 5, 8)), draw.choice((1, 2, 3, 4, 5, 6, 8, 10))
        if not 256 <= kv_heads * group * head_dim <= 8192:
            continue
        seq_len = draw.choice((draw.randint(4, 120) * 128, draw.randint(4, 40) * 128, draw.randint(500, 9000)))
        window, short = draw.choice((256, 700, 1024, 2048)), draw.choice((256, 1000))
        features: list[dict[str, Any]] = [{}, {}, {"sliding_window": window}, {"documents": True}]
        features += [{"documents": True, "sliding_window": short}, {"alibi_max_bias": 8.0}, {"softcap": 40.0}]
        found.append(_shape(kv_heads * group, kv_heads, head_dim, seq_len, draw.choice(features)))
    return found


def scans() -> list[Shape]:
    """Every scan once: those of models at 4,096 tokens, then sizes in turn, then lengths, also such as no chunk divides."""
    found = [_scan(heads, dim, state, groups, 4096) for heads, dim, state, groups in PUBLISHED["scans"].values()]
    found += [_scan(spec.n_heads, spec.head_dim, spec.d_state, spec.n_groups, 4096) for spec, _ in _specs(SSDSpec)]
    for d_state in (16, 64, 128, 256):
        for head_dim in (64, 128):
            found += [_scan(4096 // head_dim, head_dim, d_state, groups, 4096) for groups in (1, 2, 8)]
    found += [_scan(heads, 64, 128, 1, 4096) for heads in (16, 32, 128)]
    for seq_len in (1024, 2048, 8192, 32768, 1000, 4001, 6100):
        found += [_scan(64, 64, d_state, 1, seq_len) for d_state in (64, 128, 256)]
    return list(dict.fromkeys(found))


def others() -> Iterator[Callable[[], Cell]]:
    """Norms, rotary positions, convolution and gated norm at 768 to 8,192 channels."""
    for dim in (768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192):
        for spec in (NormSpec(dim), NormSpec(dim, "layernorm", True)):
            yield _made("norm", spec)
    for head_dim in (64, 96, 128, 256):
        for width in (768, 2048, 4096, 8192):
            yield _made("rotary", RotarySpec(head_dim), ("heads", width // head_dim))
    for width in (768, 1536, 2048, 3072, 4096, 5120, 8192):
        yield _made("conv1d", Conv1dSpec(width + 2 * 128, 4))
        yield _made("gated_norm", GatedNormSpec(width, 1, 1e-5))


def _made(name: str, spec: Any, *options: tuple[str, Any]) -> Callable[[], Cell]:
    return lambda: cell(operation(name), Shape(spec, TOKENS // 4096, 4096, None, options))


def scan_cell(shape: Shape, chunks: tuple[int, ...]) -> Cell:
    """chunks: of mamba_ssm's kernels. Named by its groups too, and without bars."""
    found = cell(operation("ssd"), shape, chunks)
    return replace(found, name=f"{found.name}, {shape.spec.n_groups} groups")


def _shape(heads: int, kv_heads: int, head_dim: int, seq_len: int, features: dict[str, Any]) -> Shape:
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, **features)
    return Shape(spec, max(1, TOKENS // seq_len), seq_len)


def _scan(heads: int, head_dim: int, d_state: int, groups: int, seq_len: int) -> Shape:
    return operation("ssd").sized(heads=heads, head_dim=head_dim, d_state=d_state, groups=groups, seq_len=seq_len)


def _shipped() -> Iterator[Shape]:
    for spec, seq_len in _specs(AttentionSpec):
        # The factor of the scores changes no kernel.
        spec = replace(spec, scale=spec.head_dim**-0.5)
        if spec.sliding_window is not None and spec.sliding_window >= seq_len:
            spec = replace(spec, sliding_window=None)
        yield Shape(spec, max(1, TOKENS // seq_len), seq_len)


def _specs(kind: type) -> Iterator[tuple[Any, int]]:
    """(the kernel's spec, data.seq_len) of every block of the shipped YAMLs."""
    from llmtrain.schema.load import load_config

    for file in sorted(YAMLS.glob("pretrain/*.yaml")):
        config = load_config(file)
        for block in config.model.blocks.values():
            for _, part in block.parts():
                kernel = part.kernel(config.model.d_model, documents=config.data.mask_documents)
                if kernel is not None and isinstance(kernel.spec, kind):
                    yield kernel.spec, config.data.seq_len
