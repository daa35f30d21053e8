"""Our models in lm-evaluation-harness: `lm_eval --model llmtrain --model_args run=RUN --tasks …`.

The harness writes the prompts and computes the metrics; this answers its requests. The entry point `lm_eval.models` of
pyproject.toml tells the harness of it from its first release after 0.4.13 on, llmtrain_lm_eval.py tells 0.4.13. In a program
that imported torch before lm_eval, `import llmtrain.eval.lm_eval_model` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import simple_parse_args_string
from tqdm import tqdm

from llmtrain.distributed.world import World, initialize, world_from_environment
from llmtrain.eval.errors import EvalError, prefixed
from llmtrain.eval.lm_eval.generation import read_generation
from llmtrain.eval.prompts.chat import ChatTemplate, chat_template
from llmtrain.eval.prompts.encode import GenerationLimits, Prompt, encode, rolling_requests
from llmtrain.eval.prompts.lm_eval import ENCODING
from llmtrain.eval.prompts.requests import (
    GeneratedText,
    GenerateUntilRequest,
    Loglikelihood,
    LoglikelihoodRequest,
    Request,
    Response,
    Responses,
)
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.scoring.data_parallel import DataParallel, run_requests
from llmtrain.eval.scoring.load import Backend, find_model, find_tokenizer, load_scorer, tokenizer_identity, window_of
from llmtrain.eval.tasks.documents import Document, Question, Text
from llmtrain.kernels.platform import DTYPES
from llmtrain.logs import log

import_module("lm_eval.models")  # the harness leaves out its own models where there is another already

_BACKENDS = ("auto", "llmtrain", "transformers")
_DEFAULT_DEVICE = "cuda:0"
"""The harness's `--device` where none is given."""


class LlmtrainLM(LM):
    """Model for lm-evaluation-harness.

    run: a run's folder (its newest checkpoint), a checkpoint, either also in a store (s3://bucket/prefix), or a folder or hub name
        in Hugging Face format; `pretrained` is another name of it, by which the harness names its files of results.
    tokenizer, backend, max_length: as for a model of `llmtrain eval`. dtype, max_batch_tokens, share_prefixes: as in its YAML.
    chat_template: a Jinja file, in place of the tokenizer's template, for --apply_chat_template.
    device: cuda, cuda:1 or cpu; default the GPU, if there is one. Under torchrun or `accelerate launch` each process takes its own.
    batch_size, max_batch_size, which the harness always gives, have no effect: batches are made by tokens.
    Raises UserError for an argument or a model that cannot be used.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        pretrained: str | None = None,
        tokenizer: str | None = None,
        backend: Backend = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        max_batch_tokens: int | None = None,
        share_prefixes: bool = True,
        chat_template: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool = False,  # no code of a model is run, with or without it
        **unknown: Any,
    ):
        super().__init__()
        self._check_arguments(unknown, backend, dtype, {"max_length": max_length, "max_batch_tokens": max_batch_tokens})
        if (source := run or pretrained) is None or (run and pretrained):
            raise EvalError(
                "--model llmtrain needs one model: --model_args run=FOLDER (a run, a checkpoint or a hub name)"
            )
        world = world_from_environment()
        self._rank, self._world_size = world.rank, world.size
        self._device = _device(device, world)
        # Rank 0 alone looks for the newest checkpoint.
        self.found = DataParallel(world).broadcast(lambda: find_model(str(source), backend))
        self.max_length = max_length or window_of(self.found)
        self._text_tokenizer = find_tokenizer(self.found, tokenizer)
        self._tokenizer = PromptTokenizer(self._text_tokenizer)
        self._template_setting = True if chat_template is None else str(chat_template)
        self.scorer = load_scorer(
            self.found,
            self._text_tokenizer,
            dtype=None if dtype == "auto" else dtype,
            max_length=max_length,
            max_batch_tokens=max_batch_tokens,
            share_prefixes=share_prefixes,
            device=self._device,
        )

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> LlmtrainLM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> LlmtrainLM:
        """Model from --model_args and the harness's own options, over which the arguments take precedence."""
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if options.get("device") == _DEFAULT_DEVICE and not torch.cuda.is_available():
            del options["device"]  # also where nobody has written --device
            if "device" not in arg_dict:
                log.info(
                    f"there is no GPU here for --device {_DEFAULT_DEVICE} (its default): the model runs on the CPU"
                )
        return cls(**{**options, **arg_dict})

    @staticmethod
    def _check_arguments(unknown: Mapping[str, Any], backend: str, dtype: str, numbers: Mapping[str, Any]) -> None:
        if unknown:
            raise EvalError(
                f"--model llmtrain has no model argument {', '.join(unknown)}; it has run, tokenizer, backend, dtype, "
                "max_length, max_batch_tokens, share_prefixes, chat_template and device"
            )
        for name, value, allowed in (("backend", backend, _BACKENDS), ("dtype", dtype, ("auto", *DTYPES))):
            if value not in allowed:
                raise EvalError(f"--model llmtrain: {name}={value}; expected one of {', '.join(allowed)}")
        for name, value in numbers.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise EvalError(f"--model llmtrain: {name}={value}; expected a whole number from 1 on")

    @property
    def max_gen_toks(self) -> int:
        """New tokens of an answer whose task names no number; as for the harness's `hf`."""
        return 256

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        prompts = [Prompt(_document(at, one), 0, *one.args) for at, one in enumerate(requests)]
        asked = list(self._encoded(prompts))
        for prompt, request in zip(prompts, asked, strict=True):
            if isinstance(request, LoglikelihoodRequest) and len(request.continuation) > self.max_length:
                raise EvalError(
                    f"{prompt.document.where}: a continuation of {len(request.continuation)} tokens does not fit the model's "
                    f"window of {self.max_length}; leave the document out, or raise max_length if the model can read more"
                )

        def value(responses: Sequence[Response]) -> tuple[float, bool]:
            (response,) = responses
            assert isinstance(response, Loglikelihood)
            return response.log_likelihood, response.greedy

        return self._run("loglikelihood", requests, asked, value, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        # A text without tokens, for which there is no request, has the log-likelihood 0.
        some = bool(self._tokenizer.special(""))
        texts = [_document(at, one, Text(one.args[0])) for at, one in enumerate(requests) if some or one.args[0]]
        asked = list(rolling_requests(texts, self._tokenizer, self.max_length))

        def value(responses: Sequence[Response]) -> float:
            return sum(one.log_likelihood for one in responses if isinstance(one, Loglikelihood))

        return self._run("loglikelihood_rolling", requests, asked, value, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = [Prompt(_document(at, one), 0, one.args[0], None) for at, one in enumerate(requests)]
        arguments: list[Any] = [one.args[1:] for one in requests]
        options = [
            self._generation(kwargs, prompt.document.where)
            for (kwargs, *_), prompt in zip(arguments, prompts, strict=True)
        ]
        asked = [replace(one, **more) for one, more in zip(self._encoded(prompts), options, strict=True)]

        def value(responses: Sequence[Response]) -> str:
            (response,) = responses
            assert isinstance(response, GeneratedText)
            return response.text

        return self._run("generate_until", requests, asked, value, disable_tqdm)

    def _encoded(self, prompts: Sequence[Prompt]) -> Iterator[Any]:
        """Requests of the prompts, in order."""
        for some in encode(prompts, ENCODING, self._tokenizer, GenerationLimits((), 1)):
            yield from some

    def _generation(self, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Fields of a GenerateUntilRequest from the harness's generation_kwargs. Raises EvalError for what is not supported."""
        # The harness seeds torch (--seed).
        seed = (torch.initial_seed() * self._world_size + self._rank) % 2**40
        with prefixed(where):
            limits = read_generation(arguments, (), seed)
        if limits.max_new_tokens >= self.max_length:
            raise EvalError(
                f"{where}: max_gen_toks is {limits.max_new_tokens}; the model's window of {self.max_length} tokens must hold the "
                "answer and some context"
            )
        return {"stops": limits.stops, "max_new_tokens": limits.max_new_tokens, "sampling": limits.sampling}

    def _run(
        self,
        kind: str,
        requests: Sequence[Instance],
        asked: Sequence[Request],
        value: Callable[[Sequence[Response]], Any],
        disable_tqdm: bool,
    ) -> list[Any]:
        """The value of each of the harness's requests, from the responses to those of ours with its index as document."""
        sampled = {one.document for one in asked if isinstance(one, GenerateUntilRequest) and one.sampling}

        def keep(new: Responses) -> None:
            for at in new.keys() - sampled:
                self.cache_hook.add_partial(kind, requests[at].args, value(new[at]))

        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc=f"Running {kind} requests")

        def progress(count: int) -> None:
            bar.update(count)

        with bar:
            responses = run_requests(
                asked,
                self.scorer,
                DataParallel(World(0, 1, 0, 1)),  # the harness has divided the documents among the ranks
                title=kind,
                window=self.max_length,
                known={},
                save=keep,
                progress=progress,
            )
        return [value(responses.get(at, [])) for at in range(len(requests))]

    @cached_property
    def _template(self) -> ChatTemplate:
        template = chat_template(self._text_tokenizer, self._template_setting)
        assert template is not None
        return template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._template.render(chat_history, continue_final_message=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if isinstance(chat_template, str):
            raise EvalError(
                f"--apply_chat_template {chat_template}: llmtrain takes no name of a template; give a Jinja file as "
                "--model_args chat_template=FILE and --apply_chat_template alone"
            )
        return self._template.text if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Name for the harness's cache of prompts, the same only for equal tokenizers and templates."""
        return f"llmtrain-{tokenizer_identity(self._text_tokenizer)[:16]}-{self._template.digest}"

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        tensor = tensor[None] if tensor.ndim == 0 else tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        if self.world_size == 1:
            return [obj]
        parts = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, parts, dst=dst)
        return parts

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def get_model_info(self) -> dict[str, Any]:
        """Model's description in the harness's results."""
        scorer: Any = self.scorer
        parameters = list(scorer.model.parameters())
        return {
            "model_num_parameters": sum(one.numel() for one in parameters),
            "model_dtype": str(parameters[0].dtype),
            "model_path": str(self.found.folder),
            "model_sha": self.found.identity,
        }


register_model("llmtrain")(LlmtrainLM)  # no decorator: its type would hide the constructor's


def _device(name: str | None, world: World) -> torch.device:
    if world.size > 1:
        device = initialize()
        if name is not None and torch.device(name).type != device.type:
            raise EvalError(
                f"--device {name}: each of several processes takes its own {device.type} here; leave it out"
            )
        return device
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = str(name).partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdigit():
        raise EvalError(f"--device {name}: llmtrain's models run on cuda, cuda:N or cpu")
    if kind == "cuda":
        if int(number or 0) >= torch.cuda.device_count():
            raise EvalError(f"--device {name}: there are {torch.cuda.device_count()} GPUs here")
        torch.cuda.set_device(int(number or 0))
    return torch.device(kind, int(number or 0)) if kind == "cuda" else torch.device(kind)


def _document(number: int, request: Instance, content: Text | None = None) -> Document:
    where = f"task {request.task_name}, document {request.doc_id}"
    return Document(number, where, content or Question("", "", ()))
