"""The base of the sections of objectives. No torch here."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from llmtrain.config.base import Problem
from llmtrain.models.sections.feed_forward import ImplementedSection
from llmtrain.objectives.engine_rollout import EngineRollout


class ObjectiveSection(ImplementedSection):
    """The base of every objective's section. implementation: of the Objective, which is made of the section."""

    cuda_graphs_refusal: ClassVar[str | None] = None
    """Reason for which its microbatches can be no CUDA graphs."""
    parallel_refusals: ClassVar[Mapping[str, str]] = {}
    """Reasons for which ranks cannot share its sequences (`context`), layers (`tensor`, `expert`) or the model (`pipeline`), by the
    key of train.parallel."""
    trained_only: ClassVar[bool] = False
    """Labels are the tokens alone that shards mark as trained."""
    has_z_loss: ClassVar[bool] = True
    """The z-loss of train.loss is added."""
    needs_documents: ClassVar[bool] = False
    """data.mask_documents is needed."""

    packing: ClassVar[str | None] = None
    """The data.prepare.packing that shards must have; null: any."""

    @property
    def trained_per_sample(self) -> int:
        """Sequences of a step (train.global_batch_size) that are made of one sample of the data."""
        return 1

    @property
    def own_rollout(self) -> EngineRollout | None:
        """Settings by which the model that is trained draws answers in the run, where it does."""
        return None

    def answers_drawn(self, samples_per_step: int) -> int:
        """Answers that are drawn at once, over all ranks."""
        return 0

    def problems_beside(self, seq_len: int, has_beginning: bool) -> Iterator[Problem]:
        """Settings that do not fit data.seq_len, or a run that begins without trained weights (init_from, or adapters on some)."""
        yield from ()

    def records_refusal(self, name: str | None) -> str | None:
        """Reason for which it cannot be trained on shards of records of this format (data.prepare.chat.format). name: None of text,
        and of records that are not known."""
        if name in ("pairs", "labels"):
            loss = "{type: preference, loss: kto}" if name == "labels" else "preference"
            return f"holds {name}, good answers beside bad ones, for objective: {loss}; set it, or name other data"
        return None
