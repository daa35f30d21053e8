"""Options of sampling. Imports no torch."""

from dataclasses import dataclass

from llmtrain.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Sampling options. temperature: 0 takes the likeliest token. top_k: keep the k likeliest. top_p: keep the likeliest whose
    probabilities first add up to top_p (Holtzman et al., arXiv:1904.09751). repetition_penalty: divide the positive and
    multiply the negative logits of tokens seen before (Keskar et al., arXiv:1909.05858).

    Raises UserError for a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("temperature", self.temperature >= 0, "at least 0 (0 is greedy)"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1 is none)"),
            ("seed", 0 <= self.seed < 2**40, "between 0 and 2^40"),
        ):
            if not good:
                raise UserError(f"{name} = {getattr(self, name)}: must be {allowed}")
