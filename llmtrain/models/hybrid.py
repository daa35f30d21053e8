"""HybridLM: embedding -> blocks -> norm. The head and what follows it: models/causal_lm.py."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, SupportsIndex, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.errors import UserError
from llmtrain.kernels.attention.documents import documents as documents_of
from llmtrain.kernels.attention.prefix_tree import PrefixTree
from llmtrain.kernels.platform import Platform, detect
from llmtrain.models.attached_loss import AttachedLosses, TokenSharers
from llmtrain.models.backends import Chosen, chosen
from llmtrain.models.block import Block
from llmtrain.models.config import LayerRange, ModelConfig
from llmtrain.models.context import BlockContext, Context, ContextCache, LayerMixers
from llmtrain.models.costs import Flops, Work
from llmtrain.models.init import InitScale, init_weights
from llmtrain.models.layer_part import parts_of, step_sums
from llmtrain.models.layers import Affine, Embedding, Head, LearnedPositions, Norm, multiplied
from llmtrain.models.mixers.base import mixers_of
from llmtrain.models.mixers.shared_attention import SharedAttention, SharedInput
from llmtrain.models.parameters import is_trained, parameter_info
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.tensor_parallel import Part, TensorRanks, padding_unit

Stream = Tensor | tuple[Tensor, ...]
"""What a stage of a model hands to the next, [batch, T, channels] each: hidden states, then the embeddings, where a later layer's
shared block reads them, then the value that layers hand on, where a later one reads it."""


class StreamForm(NamedTuple):
    """embedding: the embeddings are in a Stream. carried: channels of the value that layers hand on, 0 where it is not in it."""

    embedding: bool = False
    carried: int = 0

    def channels(self, d_model: int) -> tuple[int, ...]:
        """Channels of each tensor of the Stream."""
        return (d_model, *[d_model] * self.embedding, *[self.carried] * (self.carried > 0))


class Selected(nn.ModuleList):
    """Some modules of a list, under their numbers in it; indexed by their places here."""

    def __init__(self, modules: Mapping[int, nn.Module]):
        super().__init__()
        for number, module in modules.items():
            self.add_module(str(number), module)

    def _get_abs_string_index(self, idx: SupportsIndex) -> str:
        return list(self._modules)[idx]


class HybridLM(nn.Module):
    """A causal language model whose layers are any interleaving of named blocks.

    platform: where it will run, which picks the kernels; default: this process's GPU, or its CPU.
    dtype: of activations in the kernels; default: bf16 on a GPU, fp32 on a CPU.
    documents: batches may come with document_ids, which not every kernel takes.
    Raises UserError when a named backend cannot serve its block here. Memory is allocated, not initialised.
    """

    def __init__(
        self,
        config: ModelConfig,
        platform: Platform | None = None,
        dtype: torch.dtype | None = None,
        documents: bool = False,
    ):
        super().__init__()
        platform = platform or detect()
        dtype = dtype or (torch.float32 if platform.vendor == "cpu" else torch.bfloat16)
        self.config, self.platform, self.dtype, self.documents = config, platform, dtype, documents

        self.embed = Embedding(config.vocab_size, config.d_model)
        self.embed_scaling = Affine(config.d_model) if config.embedding_scaling else None
        self.positions = LearnedPositions(config.max_seq_len, config.d_model) if config.positions == "learned" else None
        shared: dict[str, list[SharedAttention]] = {
            name: [
                block.load_implementation()(block, config, platform, dtype, documents)
                for _ in range(block.shared_copies)
            ]
            for name, block in config.blocks.items()
            if block.shared_copies
        }
        self.shared = nn.ModuleDict({name: nn.ModuleList(copies) for name, copies in shared.items()})
        self.blocks = nn.ModuleList()
        in_turn = {name: itertools.cycle(copies) for name, copies in shared.items()}
        for layer in config.layer_list():
            shared_input = SharedInput(next(in_turn[layer.shared]), config) if layer.shared else None
            block = config.blocks[layer.block]
            self.blocks.append(Block(block, config, platform, dtype, shared_input, documents))
        self.norm = Norm(config.d_model, config.norm, platform, dtype)
        self.head = None if config.tie_embeddings else Head(config.d_model, config.vocab_size)
        self._contexts = ContextCache()
        self._loss_names = sorted({name for _, part in parts_of(self) for name in part.losses})
        self._counts = bool(step_sums(self))
        self.losses: AttachedLosses | None = None
        self.sharers: TokenSharers | None = None  # set before a context is made
        self.ranks: TensorRanks | None = None
        self.spans: list[LayerRange] = [(0, len(self.blocks))]
        self.compiled = False  # its layers' forward is

    @property
    def begins(self) -> bool:
        """The model's first layer is here; not so in most stages."""
        return self.spans[0][0] == 0

    @property
    def is_whole(self) -> bool:
        """False for a stage of a pipeline."""
        return self.begins and self.ends and len(self.spans) == 1

    @property
    def ends(self) -> bool:
        """The model's last layer is here."""
        return self.spans[-1][1] == len(self.config.layer_list())

    def crossing(self, border: int) -> StreamForm:
        """Tensors that go from the layers before this one to it and later ones, beside the hidden states."""
        later = self.config.layer_list()[border:]
        carries = (self.config.blocks[one.block].carries for one in later)
        # A value that is replaced before it is read does not go on: its gradient would be none.
        carried = next((one.reads for one in carries if any(one)), 0)
        return StreamForm(any(one.shared for one in later), carried)

    def stage(self, *spans: LayerRange) -> HybridLM:
        """The layers of some spans as a model: with the embedding if the first is among them, with final norm and head if the last
        is, and with the shared blocks that they use. Parts and parameters are this model's, under the same names, so that the
        checkpoints of all stages together are that of the whole. On the meta device, memory is then allocated for the stage alone.

        `forward` computes one span. It reads what was returned for the layers before, and for a span that is not the last returns
        a Stream in the form `crossing` of its end. Stages that hold the same parameter (a shared block's; the embedding, which a
        tied head reads) each have a part of its gradient, to be added up.
        """
        count = len(self.blocks)
        assert self.begins and self.ends and all(0 <= first < last <= count for first, last in spans), (
            f"no layers {spans}"
        )
        part = copy.copy(self)
        part._modules, part._contexts, part.spans = dict(self._modules), ContextCache(), list(spans)
        part.blocks = Selected({i: self.blocks[i] for span in spans for i in range(*span)})
        used = part.shared_uses()
        kept = {
            name: Selected({i: one for i, one in enumerate(copies) if one in used})
            for name, copies in cast("Iterable[tuple[str, nn.ModuleList]]", self.shared.items())
        }
        part.shared = nn.ModuleDict({name: some for name, some in kept.items() if len(some)})
        tied_head = part.ends and self.head is None
        for name, is_used in (
            ("embed", part.begins or tied_head),
            ("embed_scaling", part.begins),
            ("positions", part.begins),
            ("norm", part.ends),
            ("head", part.ends),
        ):
            if not is_used:
                setattr(part, name, None)
        return part

    def split(self, ranks: TensorRanks) -> None:
        """Divide the model, on the meta device, between tensor-parallel ranks: this one keeps its part, under the same names.

        Raises UserError when a block cannot be divided.
        """
        self.ranks = ranks
        self.embed.split(ranks)
        if self.head is not None:
            self.head.split_output(ranks, [Part(self.config.vocab_size)])
        for block in self.layer_blocks():
            block.split(ranks)
        for copies in cast("Iterable[Iterable[SharedAttention]]", self.shared.values()):
            for shared in copies:
                shared.split(ranks)

    def forward(self, inputs: Stream, context: Context, span: int = 0) -> Stream:
        """Hidden states for the head, after the final norm: [batch, T, d_model], or of the n tokens of context.only
        [batch, n, d_model]. Of a tensor-parallel rank: those of its own tokens, unless TensorRanks.whole_tokens. Of a stage, see
        there.

        inputs: token ids [batch, T]. context: of the method `context` or `prefix_context`, or of Cache.read. span: its
        number.
        """
        first, end = self.spans[span]
        x, *further = inputs if isinstance(inputs, tuple) else (inputs,)
        if first == 0:
            x = self._embedded(x, context)
        embedding = further.pop(0) if first and self.crossing(first).embedding else x
        carried = further
        last, before = len(self.config.layer_list()), sum(b - a for a, b in self.spans[:span])
        here = itertools.islice(zip(self.layer_blocks(), context.blocks, strict=True), before, before + end - first)
        for layer, (block, block_context) in enumerate(here, first + 1):
            read = carried if block.carries.reads else ()
            x = block(x, embedding, block_context, context.only if layer == last else None, *read)
            if isinstance(x, tuple):
                x, *carried = x
        if end < last:
            sent = self.crossing(end)
            out = (x, *[embedding] * sent.embedding, *carried[: sent.carried > 0])
            return out if len(out) > 1 else x
        x = self.norm(x)
        # The logits' factor: here, so that no form of the loss or of the scores has to know it.
        return multiplied(x, self.config.logit_multiplier)

    def _embedded(self, input_ids: Tensor, context: Context) -> Tensor:
        x = multiplied(self.embed(input_ids), self.config.embedding_multiplier)
        if self.positions is not None:
            assert context.positions is not None
            positions = context.positions
            if self.ranks is not None and isinstance(positions, Tensor):
                positions = self.ranks.own(positions)
            x = x + self.positions(positions)
        x = x if self.embed_scaling is None else self.embed_scaling(x)
        return F.dropout(x, self.config.dropout, self.training)

    def enable_segments(self) -> None:
        """Be ready for contexts of segments. Raises UserError when a block has no form for them."""
        for _, mixer in mixers_of(self):
            mixer.enable_segments()

    def context(
        self,
        seq_len: int,
        device: torch.device,
        document_ids: Tensor | None = None,
        segments: ContextParallelRanks | None = None,
    ) -> Context:
        """The context of whole sequences, as in training and validation.

        document_ids: [batch, T], integers that never fall: tokens see those of their own document only.
        segments: the context is of this rank's part of the sequences (after `enable_segments`); seq_len and document_ids
        stay those of whole sequences.
        Raises UserError for sequences longer than the learned positions.
        """
        assert document_ids is None or self.documents
        unpadded = seq_len - padding_unit(segments, self.ranks) + 1
        if self.positions is not None and unpadded > self.config.max_seq_len:
            raise UserError(f"sequence of {seq_len} tokens, but model.max_seq_len is {self.config.max_seq_len}")
        positions = None
        if self.positions is not None:
            positions = seq_len
            if document_ids is not None:  # each token's place in its document
                positions = torch.arange(seq_len, device=device) - documents_of(document_ids).starts
            if segments is not None or self.ranks is not None:
                whole = torch.arange(seq_len, device=device)[None] if isinstance(positions, int) else positions
                whole = whole if segments is None else segments.take(whole)
                # Tokens added at the end may lie behind the last position; nothing sees them.
                positions = whole.clamp(max=self.config.max_seq_len - 1)
        losses = self._losses(device)
        blocks = self._contexts(self.layer_mixers(), seq_len, device, document_ids, segments, losses)
        return Context(blocks, positions, losses=losses)

    def _losses(self, device: torch.device) -> AttachedLosses | None:
        """Losses that layers attach, the same object for every context on this device; None where they attach none and count
        nothing."""
        if (self._loss_names or self._counts) and (self.losses is None or self.losses.weight.device != device):
            pooled = {part: part.pooling for _, part in parts_of(self) if part.pooling is not None}
            self.losses = AttachedLosses.named(self._loss_names, device, list(pooled.values()), self.sharers)
            for part, counts in zip(pooled, self.losses.counts, strict=True):
                part.counts = counts
        return self.losses

    def prefix_refusal(self) -> str | None:
        """Reason why the model cannot read packed requests that share a prefix (`prefix_context`), or None."""
        mixers = [mixer for pair in self.layer_mixers() for mixer in pair if mixer is not None]
        return next((reason for mixer in mixers if (reason := mixer.prefix_refusal())), None)

    def prefix_context(self, tree: PrefixTree, only: Tensor) -> Context:
        """The context of packed requests [1, T] that share prefixes. only: [n], the tokens whose hidden states are wanted."""
        blocks = [
            BlockContext(mixer.prefix_context(tree), shared and shared.prefix_context(tree))
            for mixer, shared in self.layer_mixers()
        ]
        return Context(blocks, tree.positions, only)

    def layer_mixers(self) -> list[LayerMixers]:
        """Every layer's mixer, and that of the shared block which feeds the layer, in order."""
        return [(block.mixer, block.shared_mixer) for block in self.layer_blocks()]

    def layer_blocks(self) -> Iterator[Block]:
        """The layers, in order."""
        # A checkpoint wrapper passes attributes on.
        return iter(cast("Iterable[Block]", self.blocks))

    def chosen_kernels(self) -> list[Chosen]:
        """The kernel of each part of each block, and why."""
        dtype = str(self.dtype).removeprefix("torch.")
        return list(chosen(self.config, self.platform, dtype, self.documents))

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, d_model]; the embedding's when tied."""
        return self.embed.weight if self.head is None else self.head.matrix()

    def init_weights(self, seed: int, names: Collection[str] | None = None) -> None:
        """Fills all parameters, or those of these names; the same values for any sharding and device (see models/init.py)."""
        init = self.config.init
        depth = 2 * len(self.config.layer_list()) if init.scale_residual else 1
        std = None if init.type == "kaiming" else init.std
        init_weights(self, InitScale(std, depth**-0.5), seed, names)

    def cast(self, dtype: torch.dtype) -> HybridLM:
        """All parameters to `dtype`, for inference, except those that mixers keep in fp32."""
        for parameter, info in parameter_info(self).items():
            if not info.fp32:
                parameter.data = parameter.data.to(dtype)
        return self

    def shared_uses(self) -> list[SharedAttention]:
        """The shared block of each use, in order."""
        return [block.shared_input.shared for block in self.layer_blocks() if block.shared_input is not None]

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        """FLOP of training on one sequence. See flops/count.py for what `causal` means, and for layers below the first trained."""
        total = Flops()
        if self.ends:
            head = Work(head=2 * seq_len * self.config.d_model * self.config.vocab_size)
            tied = Flops.with_weight(head, self.head_weight.requires_grad)
            total = tied if self.head is None else self.head.flops(seq_len)
        backward = self.layers_with_backward()
        for index, block in enumerate(self.layer_blocks()):
            flops = block.flops(seq_len, causal)
            total += flops if index in backward else flops.without_backward()
        reached = bool(backward) or is_trained(self.norm)
        return total if reached else replace(total, grad_input=Work())

    def layers_with_backward(self) -> dict[int, Block]:
        """The layers, by their places in the model, through which gradients go: all where the embedding is trained, else those from
        the first trained on."""
        layers = list(self.layer_blocks())
        parts = [[part for part in (self.embed, self.positions) if part is not None]]
        parts += [[block, *([] if block.shared_input is None else [block.shared_input.shared])] for block in layers]
        first = next((i for i, some in enumerate(parts) if any(map(is_trained, some))), len(parts))
        return dict(list(enumerate(layers))[max(first - 1, 0) :])
