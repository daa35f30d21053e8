"""Prompts in a chat template against lm-evaluation-harness: token ids, and metrics from the same log-likelihoods."""

import importlib.util
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.tokenize.tokenizer import TextTokenizer, load_tokenizer
from llmtrain.eval.lm_eval.task import make_task
from llmtrain.eval.native_task import load_task
from llmtrain.eval.prompts.chat import PromptStyle, chat_template, question_turns
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest, Request
from tests.support.icl import ask, byte_level, some_sentence

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

HEADERS = """\
{{ bos_token }}{% for message in messages %}\
{{ '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""
"""Llama 3's kind: begins with BOS, which the tokenizer puts before every text as well; trims the turns."""

CHATML = """\
{% if messages[0]['role'] != 'system' %}<|start|>system
Answer in words.<|end|>
{% endif %}
{% for message in messages %}
{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{ '<|start|>assistant\\n' }}
{%- endif %}"""
"""ChatML's kind: no BOS, a system turn of its own where there is none."""

NO_SYSTEM = """\
{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn, please') }}{% endif %}
{% for message in messages %}{{ '<|start|>' + message['role'] + ': ' + message['content'] + '<|end|>' }}{% endfor %}
{% if add_generation_prompt %}<|start|>assistant:{% endif %}"""
"""Gemma's kind: refuses a system turn; the prompt ends without white space."""

TEMPLATES = {"headers": HEADERS, "chatml": CHATML, "no_system": NO_SYSTEM}

METRICS = [{"metric": name} for name in ("acc", "acc_norm", "acc_mutual_info")]
CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "metric_list": METRICS,
    "doc_to_text": "Question: {{query}}\nAnswer:",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
}
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "choice": (
        {"type": "multiple_choice", "query": "Question: {{query}}\nAnswer:", "pmi": "", "preamble": "On {{topic}}."},
        CHOICE | {"description": "On {{topic}}."},
    ),
    "schema": (
        {"type": "schema"},
        CHOICE
        | {
            "metric_list": METRICS[:2],
            "doc_to_text": "gold",
            "doc_to_choice": "context_options",
            "doc_to_target": "continuation",
        },
    ),
    "cloze": (
        {"type": "language_modeling", "continuation": " {{continuation}}"},
        {
            "output_type": "loglikelihood",
            "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
            "doc_to_text": "context",
            "doc_to_target": " {{continuation}}",
        },
    ),
    "answer": (
        {"type": "generation", "context": "{{query}}\n", "preamble": "Answer.\n", "lm_eval": {"stops": ["\n", "."]}},
        {
            "output_type": "generate_until",
            "metric_list": [{"metric": "exact_match"}],
            "doc_to_text": "{{query}}\n",
            "doc_to_target": "answer",
            "description": "Answer.\n",
            "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 256, "do_sample": False},
        },
    ),
    "text": (
        {"type": "perplexity", "text": "{{query}}"},
        {
            "output_type": "loglikelihood_rolling",
            "metric_list": [{"metric": "word_perplexity"}],
            "doc_to_text": "",
            "doc_to_target": "query",
        },
    ),
}
"""(our settings, the harness's) of the same task, by type."""


def records(count: int = 8) -> list[dict[str, Any]]:
    """Records with the fields of all types. Some texts have spaces at their ends, some spell special tokens."""
    rng = random.Random(3)

    def text(words: int) -> str:
        return rng.choice(("", "", " ", "<s>", "<|end|>")) + some_sentence(rng, words) + rng.choice(("", "", " "))

    return [
        {
            "query": text(7),
            "choices": [text(2) for _ in range(3)],
            "context_options": [text(5), text(6)],
            "continuation": some_sentence(rng, 3),
            "context": text(6),
            "answer": some_sentence(rng, 1),
            "topic": some_sentence(rng, 2),
            "gold": rng.randrange(2),
        }
        for _ in range(count)
    ]


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request, tmp_path_factory) -> TextTokenizer:
    """A tokenizer with the template's special tokens, read from a folder with the template."""
    made = byte_level(bos=request.param == "headers")
    made.backend.add_special_tokens(["<|start|>", "<|end|>", "<|eot|>"])
    folder = tmp_path_factory.mktemp(request.param)
    replace(made, chat_template=TEMPLATES[request.param]).save(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def harness(tokenizer):
    from transformers import AutoTokenizer

    from tests.support.harness import Harness

    return Harness(AutoTokenizer.from_pretrained(str(tokenizer.folder)))


def asked(requests: list[Request]) -> tuple[list[Any], list[Any]]:
    return (
        [(one.context, one.continuation) for one in requests if isinstance(one, LoglikelihoodRequest)],
        [(one.context, one.stops, one.max_new_tokens) for one in requests if isinstance(one, GenerateUntilRequest)],
    )


STYLES = [(0, True, ""), (3, True, "Be brief."), (3, False, ""), (2, False, "Be brief.\n")]
"""(shots, few-shot examples as turns, system instruction)."""


@pytest.mark.parametrize("kind", TASKS)
def test_prompts_and_scores_are_the_harness(kind: str, tokenizer, harness, tmp_path):
    from tests.support import harness as oracle

    data, file = tmp_path / "data.jsonl", tmp_path / "task.yaml"
    data.write_text("".join(json.dumps(one) + "\n" for one in records()))
    mine, theirs = TASKS[kind]
    file.write_text(json.dumps({"name": kind, "source": {"path": data.name}} | mine))
    task = load_task(file, "lm-eval")
    config = oracle.local({"test": data}, tmp_path / "cache", test_split="test", fewshot_split="test", **theirs)
    documents = task.documents()
    template = chat_template(tokenizer, True)
    plain = asked(task.requests(documents, tokenizer, 0, max_seq_len=2048))
    for shots, multiturn, system in STYLES[: 1 if kind == "text" else None]:
        style = PromptStyle(template, system, multiturn)
        requests = task.requests(documents, tokenizer, shots, max_seq_len=2048, style=style)
        harness.asked.clear()
        harness.generations.clear()
        results = oracle.evaluate(
            harness,
            config,
            shots,
            None,
            apply_chat_template=True,
            fewshot_as_multiturn=multiturn,
            system_instruction=system or None,
        )
        assert asked(requests) == (harness.asked, harness.generations), (shots, multiturn, system)
        assert (asked(requests) == plain) == (kind == "text")
        found = task.metrics(documents, requests, ask(requests)).score.value
        assert found in [pytest.approx(value, rel=1e-9) for value in results.values() if isinstance(value, float)]


PREFIXES = {"choice": ["", "It is", "So: "], "schema": ["So"], "cloze": [""], "answer": ["The answer is"], "text": [""]}
"""Beginnings of answers (gen_prefix), by type."""


@pytest.mark.parametrize("kind", TASKS)
def test_files_of_the_harness(kind: str, tokenizer, harness, tmp_path):
    from tests.support import harness as oracle

    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in records()))
    for prefix in PREFIXES[kind]:
        settings = TASKS[kind][1] | ({"gen_prefix": prefix} if prefix else {})
        config = oracle.local({"test": data}, tmp_path / "cache", test_split="test", fewshot_split="test", **settings)
        files = {"data_files": config["dataset_kwargs"]["data_files"]}
        task = make_task(config | {"dataset_kwargs": files}, tmp_path / "it.yaml")
        documents = task.documents()
        for shots, multiturn, system in STYLES[: 1 if kind == "text" else 3]:
            style = PromptStyle(chat_template(tokenizer, True), system, multiturn)
            requests = task.requests(documents, tokenizer, shots, max_seq_len=2048, style=style)
            harness.asked.clear()
            harness.generations.clear()
            options = {"fewshot_as_multiturn": multiturn, "system_instruction": system or None}
            oracle.evaluate(harness, config, shots, None, apply_chat_template=True, **options)
            assert asked(requests) == (harness.asked, harness.generations), (prefix, shots, multiturn, system)


def test_text_without_a_template_takes_the_system_instruction_too(tokenizer, harness, tmp_path):
    from tests.support import harness as oracle

    data, file = tmp_path / "data.jsonl", tmp_path / "task.yaml"
    data.write_text("".join(json.dumps(one) + "\n" for one in records()))
    mine, theirs = TASKS["choice"]
    file.write_text(json.dumps({"name": "it", "source": {"path": data.name}} | mine))
    task = load_task(file, "lm-eval")
    requests = task.requests(task.documents(), tokenizer, 2, style=PromptStyle(None, "Be brief."))
    harness.asked.clear()
    config = oracle.local({"test": data}, tmp_path / "cache", test_split="test", fewshot_split="test", **theirs)
    oracle.evaluate(harness, config, 2, None, system_instruction="Be brief.")
    assert asked(requests)[0] == harness.asked


def test_questions_examples_and_choices_are_written_as_the_harness_does(tokenizer, harness, tmp_path):
    from lm_eval.api.task import ConfigurableTask

    from tests.support import harness as oracle

    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in records()))
    template = chat_template(tokenizer, True)
    for question, multiturn, system, chat in itertools.product(
        ["{{query}}", "{{query}}\n"],
        [True, False],
        [None, "Be brief."],
        [True, False],
    ):
        settings = CHOICE | {"doc_to_text": question, "target_delimiter": " = "}
        settings |= {"fewshot_config": {"sampler": "first_n"}, "fewshot_split": "test"}
        config: Any = oracle.local({"test": data}, tmp_path / "cache", test_split="test", **settings)
        task: Any = ConfigurableTask(config=config | {"num_fewshot": 2})
        task.set_fewshot_seed(1234)
        style = PromptStyle(template if chat else None, system or "", multiturn)
        documents = list(task.test_docs())
        for number, document in enumerate(documents[:4]):
            examples = [one for at, one in enumerate(documents) if at != number][:2]
            turns = style.system_turns("")
            for one in examples:
                answer = one["choices"][one["gold"]]
                turns += question_turns(task.doc_to_text(one), answer, delimiter=" = ", example_delimiter="\n\n")
            turns += question_turns(task.doc_to_text(document), delimiter=" = ")
            options = {"apply_chat_template": chat, "fewshot_as_multiturn": multiturn, "system_instruction": system}
            call = harness.apply_chat_template if chat else None
            expected = task.fewshot_context(document, 2, chat_template=call, **options)
            assert style.prompt(turns) == expected
            asked = task.construct_requests(
                document, expected, metadata=("it", 0, 1), apply_chat_template=chat, chat_template=call
            )
            delimiter = style.delimiter(" = ")
            assert [one.args for one in asked[:3]] == [(expected, delimiter + one) for one in document["choices"]]


def test_a_file_takes_the_place_of_the_tokenizers_template(tokenizer, tmp_path: Path):
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages | tojson }}{{ eos_token }}{% if add_generation_prompt %}>{% endif %}")
    template = chat_template(tokenizer, str(file))
    assert template is not None
    turns = question_turns("1 < 2 é?")
    assert PromptStyle(template).prompt(turns) == '[{"role": "user", "content": "1 < 2 é?"}]<|endoftext|>>'
