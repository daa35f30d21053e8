"""The section of a block whose layer has several mixers side by side. No torch here."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from llmtrain.config.base import Problem
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.attention import AttentionBlock
from llmtrain.models.sections.block import BlockSection, Divided, WithBackend
from llmtrain.models.sections.layers import NormConfig
from llmtrain.models.sections.mamba2 import Mamba2Block

Part = Annotated[AttentionBlock | Mamba2Block, Field(discriminator="type")]


class ParallelMixersBlock(BlockSection):
    """Several mixers that read the same norm, whose outputs are summed (Falcon-H1, arXiv:2507.22448): x + sum of mixers(norm(x)),
    then an optional MLP.

    A mixer's input_multiplier and residual_multiplier are factors of its own branch. Norm and MLP are the block's.
    """

    implementation: ClassVar[str] = "llmtrain.models.mixers.parallel_mixers:ParallelMixers"

    type: Literal["parallel_mixers"]
    mixers: Annotated[list[Part], Field(min_length=2)]
    """Blocks of other types, without norm, mlp and parallel."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for i, part in enumerate(self.mixers):
            for field in ("norm", "mlp", "parallel"):
                if found := getattr(part, field):
                    found = found if isinstance(found, bool) else found.type
                    yield Problem(
                        f"mixers.{i}.{field}", found, "belongs to the block that holds the mixers; set it there"
                    )

    def named(self) -> dict[str, AttentionBlock | Mamba2Block]:
        """The mixers by type, those of a type that was there before numbered; each with the block's norm."""
        found: dict[str, AttentionBlock | Mamba2Block] = {}
        for part in self.mixers:
            same = sum(part.type == other.type for other in found.values())
            name = f"{part.type}_{same + 1}" if same else part.type
            found[name] = part.model_copy(update={"norm": self.norm})
        return found

    def parts(self) -> Iterator[tuple[str, BlockSection]]:
        for i, part in enumerate(self.mixers):
            yield f"mixers.{i}.", part

    def width_problems(self, d_model: int) -> Iterator[Problem]:
        for path, part in self.parts():
            for problem in part.width_problems(d_model):
                yield Problem(path + problem.path, problem.found, problem.message)

    def divided(self, d_model: int) -> list[Divided]:
        return [
            one._replace(name=path + one.name) for path, part in self.parts() for one in part.divided(d_model) or ()
        ]

    def segments_refusal(self, d_model: int, documents: bool = False) -> str | None:
        reasons = (part.segments_refusal(d_model, documents) for part in self.mixers)
        return next((reason for reason in reasons if reason), None)

    def gathered_bytes(self, d_model: int, width: int, seq_len: int, context: int) -> float:
        return sum(part.gathered_bytes(d_model, width, seq_len, context) for part in self.mixers)

    def workspace_bytes(self, d_model: int, width: int, seq_len: int) -> int:
        return max(part.workspace_bytes(d_model, width, seq_len) for part in self.mixers)

    def function(self, d_model: int, norm: NormConfig) -> dict[str, Any]:
        mixers = {
            name: {key: value for key, value in part.function(d_model, norm).items() if key != "norm"}
            for name, part in sorted(self.named().items())
        }
        return super().function(d_model, norm) | {"mixers": mixers}

    def with_backends(self, norm: str, backend_of: Callable[[WithBackend], str]) -> Self:
        mixers = [part.with_backends(norm, backend_of) for part in self.mixers]
        return super().with_backends(norm, backend_of).model_copy(update={"mixers": mixers})

    def describe(self, d_model: int) -> str:
        return " | ".join(part.describe(d_model) for part in self.mixers)

    def kept_products(self, d_model: int) -> dict[str, int]:
        return {
            f"mixers.{name}.{linear}": channels
            for name, part in self.named().items()
            for linear, channels in part.kept_products(d_model).items()
        }

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Bytes of all mixers, with the norm's input and output counted once."""
        total = sum((part.saved_bytes(d_model, width) for part in self.mixers), SavedBytes(0))
        return total + SavedBytes(-2 * width * d_model * (len(self.mixers) - 1))
