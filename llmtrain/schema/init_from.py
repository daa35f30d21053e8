"""The `init_from` section of the YAML: the weights that a run starts from. No torch here."""

from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from llmtrain.config.base import NonNegativeFloat, Section
from llmtrain.config.texts import PathText


class InitialWeights(Section):
    """Weights that a run starts from. A path alone means all of the checkpoint's parameters, and nothing else of it."""

    path: PathText
    """A run's folder, a checkpoint, or what `llmtrain import` wrote; also in a store, s3://bucket/prefix."""
    parameters: list[str] = Field(default=["*"], min_length=1)
    """Names of the parameters to take, as patterns (`blocks.0.*`, `embed.weight`); the others start fresh."""
    optimizer: bool = False
    """Take the optimizer state of these parameters too. The learning rate and the schedule are this run's own."""
    strict: bool = True
    """true: every parameter to take must be in the checkpoint, with the same shape. false: one that is not starts fresh."""

    upcycle: bool = False
    """The checkpoint's model has dense MLPs where this one has experts, whose first weights are copies of them (arXiv:2212.05055);
    routers start fresh."""
    upcycle_noise: NonNegativeFloat = 0.0
    """Standard deviation of random numbers that each expert's copy gets, over the root mean square of the matrix."""
    upcycle_drop: Annotated[NonNegativeFloat, Field(lt=1)] = 0.0
    """Share of each expert's hidden channels that start fresh, with the matrix's mean and standard deviation (arXiv:2502.19261)."""

    @property
    def is_whole(self) -> bool:
        """True if the checkpoint must hold exactly this model."""
        return self.strict and self.parameters == ["*"] and not self.upcycle

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _to_path(self, handler: Any) -> Any:
        written = handler(self)
        return self.path if self.is_whole and not self.optimizer else written

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, super().__get_pydantic_json_schema__(schema, handler)]}
