"""The `objective` section of the YAML: one class per objective, distinguished by `type`. No torch here."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema

from llmtrain.config.base import ByType, NonNegativeFloat, PositiveFloat, Problem, setting_error
from llmtrain.objectives.policy.sections import PolicySection
from llmtrain.objectives.section import ObjectiveSection


class NextTokenSection(ObjectiveSection):
    """Prediction of each next token, as in pretraining."""

    implementation: ClassVar[str] = "llmtrain.objectives.next_token:NextToken"
    type: Literal["next_token"] = "next_token"


class CompletionSection(ObjectiveSection):
    """Prediction of the tokens of answers alone, or of completions: those that `data.prepare.chat` marks as trained in the shards.
    The loss is a mean over the trained tokens of a step, of all ranks and microbatches; validation is on trained tokens too."""

    implementation: ClassVar[str] = "llmtrain.objectives.completion:Completion"
    needs_documents: ClassVar[bool] = True
    trained_only: ClassVar[bool] = True
    type: Literal["completion"]


LossName = Literal[
    "sigmoid", "ipo", "ipo_sum", "hinge", "robust", "apo_zero", "apo_down", "kto", "simpo", "orpo", "sft"
]
WITHOUT_REFERENCE = {"simpo", "orpo", "sft"}
"""Losses that need no reference model."""


def _parse_losses(value: Any) -> Any:
    """Weights by name, from one name or from a mapping."""
    given = {value: 1.0} if isinstance(value, str) else value
    names = get_args(LossName)
    if not isinstance(given, dict) or not given or not set(given) <= set(names):
        raise setting_error(f"expected one of {', '.join(names)}, or a mapping of such names to their weights")
    if any(isinstance(one, bool) or not isinstance(one, (int, float)) or not 0 < one <= 1e6 for one in given.values()):
        raise setting_error("expected weights above 0")
    return {name: float(weight) for name, weight in given.items()}


Losses = Annotated[
    dict[LossName, PositiveFloat],
    BeforeValidator(_parse_losses),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(get_args(LossName))},
                {
                    "type": "object",
                    "properties": {name: {"type": "number"} for name in get_args(LossName)},
                    "additionalProperties": False,
                    "minProperties": 1,
                },
            ]
        }
    ),
]


class PreferenceSection(ObjectiveSection):
    """Preferences between answers: of pairs, a chosen and a rejected answer to one prompt, or for `kto` of answers that are
    desirable or not. A mean over all pairs (for kto, answers) of a step. s is the logarithm of an answer's probability, summed over
    its tokens, less the reference model's; s_w of the chosen answer, s_l of the rejected one. The formulas are in
    llmtrain/objectives/preference_losses.py."""

    implementation: ClassVar[str] = "llmtrain.objectives.preference:Preference"
    cuda_graphs_refusal: ClassVar[str | None] = "the number of answers differs between microbatches of preferences"
    parallel_refusals: ClassVar[Mapping[str, str]] = {
        "context": "an answer's probability is a product over all of its tokens"
    }
    needs_documents: ClassVar[bool] = True
    trained_only: ClassVar[bool] = True
    has_z_loss: ClassVar[bool] = False

    type: Literal["preference"]
    loss: Losses = {"sigmoid": 1.0}
    """One loss, or several with their weights: `{sigmoid: 1, sft: 0.2}`. sigmoid: DPO (Rafailov et al., arXiv:2305.18290). ipo:
    means of s over tokens, as its authors and TRL compute it; ipo_sum: sums of s, as the equation (Azar et al., arXiv:2310.12036)
    reads and compose-rl computes it. hinge: SLiC (arXiv:2305.10425). robust: for labels of which a share label_smoothing is wrong
    (arXiv:2403.00409). apo_zero, apo_down: arXiv:2408.06266. kto: arXiv:2402.01306. simpo: without a reference, means over tokens
    (arXiv:2405.14734). orpo: without a reference, beside the cross entropy of prompt and chosen answer (arXiv:2403.07691). sft: the
    cross entropy of the chosen answer."""
    beta: PositiveFloat = 0.1
    """Factor of s: how dear a distance from the reference is. ipo: tau; simpo: its own, 2 to 2.5 in the paper; orpo: lambda."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose order is taken to be wrong, in sigmoid (conservative DPO), simpo and robust."""
    normalize_length: bool = False
    """s of sigmoid, hinge and robust is a mean over the tokens of an answer rather than a sum."""
    gamma: NonNegativeFloat = 0.5
    """simpo: margin that the chosen answer is to have."""
    desirable_weight: PositiveFloat = 1.0
    """kto: weight of desirable answers."""
    undesirable_weight: PositiveFloat = 1.0
    """kto: weight of undesirable answers."""

    def problems(self) -> Iterator[Problem]:
        names = set(self.loss)
        if "kto" in names and len(names) > 1:
            yield Problem("loss", ", ".join(self.loss), "kto is of single answers, all others of pairs; give kto alone")
        for setting, readers in _READERS.items():
            given = getattr(self, setting)
            if given != type(self).model_fields[setting].default and not names & readers:
                yield Problem(
                    setting, given, f"has no effect on {', '.join(self.loss)}; it is of {', '.join(sorted(readers))}"
                )

    def records_refusal(self, name: str | None) -> str | None:
        wanted, fields = (
            ("labels", "prompt, completion, label") if "kto" in self.loss else ("pairs", "chosen, rejected")
        )
        if name == wanted:
            return None
        found = f"holds {name}" if name else "was not made of preferences"
        loss = ", ".join(self.loss)
        return f"{found}; {loss} needs {wanted}: `llmtrain prepare` makes them of records with {fields}"

    @property
    def needs_reference(self) -> bool:
        return not set(self.loss) <= WITHOUT_REFERENCE


_READERS = {
    "label_smoothing": {"sigmoid", "simpo", "robust"},
    "normalize_length": {"sigmoid", "hinge", "robust"},
    "gamma": {"simpo"},
    "desirable_weight": {"kto"},
    "undesirable_weight": {"kto"},
}
"""Losses that read a setting."""

ObjectiveConfig = Annotated[
    NextTokenSection | CompletionSection | PreferenceSection | PolicySection, ByType("next_token", by_name=True)
]
"""The section `objective`; `objective: NAME` is one without further settings."""
