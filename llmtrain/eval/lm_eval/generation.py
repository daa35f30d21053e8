"""`generation_kwargs` of lm-evaluation-harness: where an answer ends, and how its tokens are drawn. Imports no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmtrain.config.report import suggest
from llmtrain.errors import UserError
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.encode import GenerationLimits
from llmtrain.generate.options import Sampling

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the number of generated tokens; the first that is given counts."""
_DEFAULT_LENGTH = 256
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True, False),
    "early_stopping": (False,),
}
"""Keys that may only have these values, with which nothing changes."""
_DRAWN = ("temperature", "top_k", "top_p")
_KEYS = ("until", *LENGTHS, "do_sample", *_DRAWN, "repetition_penalty")


def read_generation(given: Mapping[str, Any], stops: Sequence[str], seed: int) -> GenerationLimits:
    """Ends and sampling of answers. stops: where `until` is missing. seed: of the draws.

    As in the harness, answers are greedy without do_sample and a temperature, and whatever else stands there. Raises EvalError
    that begins with the key, for what is not supported.
    """
    if "until" in given and given["until"] is None:
        raise EvalError("until: null; write [] for answers without stop texts, or leave it out")
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if key in _WITHOUT_EFFECT:
            if value not in _WITHOUT_EFFECT[key]:
                beams = "beam search is" if key == "num_beams" else "it is"
                raise EvalError(f"{key}: {value}; {beams} not supported, only {_WITHOUT_EFFECT[key][0]}")
        elif key not in _KEYS:
            raise EvalError(f"{key}: not supported; {suggest(key, [*_KEYS, *_WITHOUT_EFFECT])}")
    until = given.get("until", list(stops))
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, list) or not all(isinstance(stop, str) for stop in until):
        raise EvalError(f"until: expected texts, found {until!r}")
    key = next((key for key in LENGTHS if key in given), LENGTHS[0])
    length = int(_number(given, key, _DEFAULT_LENGTH))
    if length < 1:
        raise EvalError(f"{key}: {length}; expected at least 1")
    return GenerationLimits(tuple(stop for stop in until if stop), length, _sampling(given, seed))


def _sampling(given: Mapping[str, Any], seed: int) -> Sampling | None:
    """None for greedy answers."""
    drawn, temperature = given.get("do_sample"), _number(given, "temperature", 0.0)
    if drawn not in (None, True, False):
        raise EvalError(f"do_sample: expected true or false, found {drawn!r}")
    if drawn and temperature == 0:
        raise EvalError("do_sample: answers cannot be drawn at temperature 0; give a temperature above it")
    penalty = _number(given, "repetition_penalty", 1.0)
    try:
        if drawn is False or (drawn is None and temperature == 0):
            return None if penalty == 1 else Sampling(temperature=0.0, repetition_penalty=penalty, seed=seed)
        top_k = int(_number(given, "top_k", 0))
        return Sampling(
            temperature=temperature,
            top_k=top_k if top_k > 0 else None,  # 0 and -1 are "all" in transformers and vLLM
            top_p=_number(given, "top_p", 1.0) if "top_p" in given else None,
            repetition_penalty=penalty,
            seed=seed,
        )
    except UserError as error:
        raise EvalError(str(error)) from None


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    try:
        return float(given.get(key, default))
    except (TypeError, ValueError):
        raise EvalError(f"{key}: expected a number, found {given[key]!r}") from None
