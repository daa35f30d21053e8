"""The section of a feed-forward layer of experts. No torch here."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmtrain.config.base import ByType, NonNegativeFloat, PositiveFloat, Problem, Section, Width, free
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.feed_forward import Carried, Divided, FeedForwardSection, Kernel


class RouterMLPSection(Section):
    """A router of its own width (ZAYA1, arXiv:2511.17127): a projection of the token, with a bias, is its state, and the logits are
    those of an MLP with two hidden layers, behind an RMSNorm of the state."""

    width: Width
    """Channels of the state and of both hidden layers."""
    previous: bool = False
    """To the state is added that of the last layer before with such a router, times a learned factor for each channel."""
    eps: PositiveFloat = 1e-5
    """Of the norm."""


class RouterSection(Section):
    """The experts that a token meets, and the weights of their outputs: the first top_k by score. Computed in fp32."""

    type: Literal["softmax", "top_k_softmax", "sigmoid"] = "softmax"
    """Scores of experts: the softmax of all logits (arXiv:2101.03961); of those of the chosen experts alone, by logit; or each
    logit's sigmoid (DeepSeek-V3, arXiv:2412.19437)."""
    renormalize: bool = True
    """Divide the weights of a token by their sum (of top_k_softmax it is 1 anyway)."""
    scale: PositiveFloat = 1.0
    """Factor of the weights, behind their sum."""
    bias: bool = False
    """The linear map to the logits has a bias."""
    mlp: RouterMLPSection | None = None
    """In place of the linear map."""
    skip: bool = False
    """Beside the experts there is one more choice, which is none: a token that makes it adds nothing (ZAYA1)."""
    choice_bias: bool = False
    """Each expert has a number that is added to its score for the choice alone, without a gradient: it balances the load without
    a loss (arXiv:2408.15664). See bias_rate."""
    bias_rate: NonNegativeFloat = 0.0
    """Change of these numbers after a step: up where the expert's load over all ranks was below the mean, down where above."""
    groups: Width = 1
    """Groups of experts of equal size, of which a token's experts are in `top_groups` alone: those with the highest scores."""
    top_groups: Width = 1
    group_score: Literal["two_best", "best"] = "two_best"
    """Score of a group: the sum of its two best experts' (DeepSeek-V3), or its best one's (DeepSeek-V2)."""
    jitter: Annotated[NonNegativeFloat, Field(lt=1)] = 0.0
    """In training, factors of the router's input are drawn between 1 - jitter and 1 + jitter (arXiv:2101.03961)."""

    def problems(self) -> Iterator[Problem]:
        if self.top_groups > self.groups:
            yield self.problem_at("top_groups", f"exceeds groups ({self.groups}); use fewer")
        if self.bias and self.mlp is not None:
            yield self.problem_at("bias", "is of the linear map, in whose place there is an mlp; set bias: false")
        if self.bias_rate and not self.choice_bias:
            yield self.problem_at(
                "bias_rate", "changes numbers that are not there; set choice_bias: true, or bias_rate: 0"
            )


class BalanceSection(Section):
    """The loss that draws tokens to all experts alike: weight * n_experts * sum over experts of f * P, where f is an expert's share
    of the tokens and P the mean of its scores, which sum to 1 for each token."""

    weight: NonNegativeFloat = 0.01
    over: Literal["layer", "model"] = "layer"
    """layer: f sums to 1, and each layer has its own loss, 1 where balanced (arXiv:2101.03961). model: f sums to top_k, f and P are
    means over all layers, and there is one loss, top_k where balanced (transformers' load_balancing_loss_func). It lets a layer
    send all tokens to a few experts where other layers prefer others: for models that were trained with it."""
    tokens: Literal["microbatch", "step"] = "microbatch"
    """Tokens that f counts: of a rank's microbatch; or of all ranks, with the step's earlier microbatches (arXiv:2501.11873)."""


class ExpertsSection(FeedForwardSection):
    """Several MLPs, of which each token meets top_k (arXiv:1701.06538)."""

    implementation: ClassVar[str] = "llmtrain.models.feed_forward.experts:Experts"
    without_function: ClassVar[frozenset[str]] = frozenset({"backend", "balance", "capacity", "z_loss"})

    type: Literal["experts"]
    n_experts: Width
    top_k: Width
    d_ff: Width
    """Hidden width of each expert."""
    activation: Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped"] = "swiglu"
    """As `type` of an MLP: of two matrices, or gated, of three. swiglu_clamped is gpt-oss's (arXiv:2508.10925), of a gate of at
    most 7 and an up between -7 and 7: gate * sigmoid(1.702 gate) * (up + 1)."""
    bias: bool = False
    """Both products of each expert have a bias."""
    latent: Width | None = None
    """Channels that the experts read and write, of two projections of their own around them all; default: d_model."""
    router: RouterSection = RouterSection()
    shared: Annotated[MLPSection, ByType("swiglu")] | None = None
    """An MLP that every token meets beside its experts."""
    shared_gate: bool = False
    """Its output is multiplied by the sigmoid of one more logit (Qwen)."""
    balance: BalanceSection = BalanceSection()
    z_loss: NonNegativeFloat = 0.0
    """Weight of the mean of log(sum of exp(logits))^2 of the router (arXiv:2202.08906), in each layer."""
    capacity: PositiveFloat | None = None
    """For comparisons. In training an expert takes at most capacity * top_k / n_experts of a rank's tokens of a microbatch, first
    choices first, then those that come first (arXiv:2006.16668, whose groups these are); for the others its output is 0.
    train.parallel.expert drops no others; with context and tensor a rank has fewer tokens. Default: no token is dropped."""
    backend: Literal["auto", "reference", "grouped_mm", "triton"] = free("auto")

    def problems(self) -> Iterator[Problem]:
        router, n = self.router, self.n_experts
        if self.top_k > n:
            yield self.problem_at("top_k", f"exceeds n_experts ({n}); use fewer")
        if router.skip and self.top_k > 1:
            yield self.problem_at("router.skip", f"is for top_k: 1, not {self.top_k}; set skip: false")
        if router.skip and router.groups > 1:
            yield self.problem_at("router.skip", "is in no group of experts; set groups: 1, or skip: false")
        if router.skip and self.capacity is not None:
            yield self.problem_at(
                "capacity", "is of routers that choose experts alone; leave it out, or set skip: false"
            )
        if n % router.groups:
            yield self.problem_at("router.groups", f"does not divide n_experts ({n})")
        elif router.groups > 1 and n // router.groups < 2 and router.group_score == "two_best":
            yield self.problem_at("router.groups", f"leaves one expert to a group of {n}; use fewer, or 1")
        elif n >= self.top_k > n // router.groups * router.top_groups:
            room = n // router.groups * router.top_groups
            yield self.problem_at(
                "top_k", f"exceeds the experts in router.top_groups of router.groups ({room}); use fewer"
            )
        if self.shared_gate and self.shared is None:
            yield self.problem_at(
                "shared_gate", "needs an MLP to multiply; give `shared` a d_ff, or set shared_gate: false"
            )

    @property
    def choices(self) -> int:
        """Number of the router's logits."""
        return self.n_experts + self.router.skip

    @property
    def carries(self) -> Carried:
        mlp = self.router.mlp
        return Carried() if mlp is None else Carried(mlp.width * mlp.previous, mlp.width)

    def spec(self, d_model: int, dtype: str = "bfloat16") -> ExpertsSpec:
        width = self.latent or d_model
        return ExpertsSpec(width, self.d_ff, self.n_experts, self.top_k, self.activation, self.bias, dtype)

    def kernel(self, d_model: int, dtype: str = "bfloat16") -> Kernel:
        return Kernel("experts", self.spec(d_model, dtype), self.backend)

    def divided(self, d_model: int) -> list[Divided]:
        return [] if self.shared is None else self.shared.divided(d_model)

    def kept_products(self, d_model: int) -> dict[str, int]:
        kept = {} if self.latent is None else {"latent_in": self.latent}
        return kept | ({} if self.shared is None else {"shared.w_in": self.shared.kept_products(d_model)["w_in"]})

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        spec = self.spec(d_model)
        # Of each row: the first product's output, and without our kernels its copy of the token, the activation's output and the
        # second product's; of each token: norm's input and output, scores in fp32 and their number by number products, order and
        # weights.
        ours = self.backend in ("auto", "triton")
        rows = self.top_k * (width * (spec.d_in + (0 if ours else 2 * spec.d_model + spec.d_ff)) + 32)
        total = SavedBytes(rows + width * (2 * d_model + 2 * (self.latent or 0)) + 12 * self.n_experts + 4 * d_model)
        # Of a router's MLP in fp32: its state, the norm's output, input and output of both activations; what it hands on.
        total += SavedBytes((4 * 6 + width) * self.carries.hands_on)
        if self.shared is not None:
            total += self.shared.saved_bytes(d_model, width) + SavedBytes(-width * d_model)
        return total

    def function(self) -> dict[str, Any]:
        return super().function() | {"router": self.router.model_dump(exclude={"bias_rate", "jitter"})}

    def describe(self, d_model: int) -> str:
        router = self.router
        kind = router.type + ("" if router.renormalize else ", not renormalised")
        parts = [f"{self.top_k} of {self.n_experts} {self.activation} experts of {self.d_ff} ({kind})"]
        if router.mlp is not None:
            parts[0] += f" by an MLP of {router.mlp.width}" + " and the state before" * router.mlp.previous
        parts[0] += ", or none" * router.skip
        parts += [f"latent {self.latent}"] if self.latent else []
        parts += (
            [f"{'gated ' if self.shared_gate else ''}shared {self.shared.describe(d_model)}"] if self.shared else []
        )
        return " + ".join(parts)
