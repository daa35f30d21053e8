"""The lm-eval convention against lm-evaluation-harness: token ids, and metrics from the same log-likelihoods."""

import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.native_task import NativeTask, load_task
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest, Request
from llmtrain.eval.report.metrics import Metrics
from llmtrain.eval.tasks.config import TaskConfig
from llmtrain.eval.tasks.sections import Examples, Source
from llmtrain.eval.tasks.templates import Template
from tests.support.icl import TOKENIZERS, ask, icl_file, some_sentence

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

LIMIT = 150  # documents
MULTIPLE_CHOICE = {
    "output_type": "multiple_choice",
    "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")],
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
}
SCHEMA = MULTIPLE_CHOICE | {"doc_to_choice": "context_options", "doc_to_text": "gold", "doc_to_target": "continuation"}
SCHEMA["metric_list"] = SCHEMA["metric_list"][:3]  # its unconditional requests are of the context options
CONTINUATION = {"output_type": "loglikelihood", "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}]}


def _mmlu(record: dict[str, Any]) -> str:
    match = re.fullmatch(r"Question: (.*)\n\(A\) (.*) \(B\) (.*) \(C\) (.*) \(D\) (.*)\n", record["query"], re.DOTALL)
    assert match
    question, *options = match.groups()
    return f"{question.strip()}\n" + "".join(f"{'ABCD'[i]}. {options[i]}\n" for i in range(4)) + "Answer:"


LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "arc_challenge": ("arc_challenge", MULTIPLE_CHOICE | {"doc_to_text": "{{query}}\nAnswer:"}),
    "arc_easy": ("arc_easy", MULTIPLE_CHOICE | {"doc_to_text": "{{query}}\nAnswer:"}),
    "boolq": ("boolq", MULTIPLE_CHOICE | {"doc_to_text": "{{query[9:]}}\nAnswer:"}),
    "hellaswag": ("hellaswag", MULTIPLE_CHOICE | {"doc_to_text": "query"}),
    "piqa": ("piqa", MULTIPLE_CHOICE | {"doc_to_text": "{{query}}Answer:"}),
    "copa": (
        "copa",
        MULTIPLE_CHOICE | {"doc_to_text": "query", "doc_to_choice": "{{[' ' + choices[0], ' ' + choices[1]]}}"},
    ),
    "openbook_qa": ("openbook_qa", MULTIPLE_CHOICE | {"doc_to_text": "query"}),
    "mmlu": (
        "mmlu",
        MULTIPLE_CHOICE
        | {
            "doc_to_text": _mmlu,
            "fewshot_config": {"sampler": "first_n"},
            "description": "The following are multiple choice questions (with answers) about {{category.replace('_', ' ')}}.\n\n",
        },
    ),
    "winograd": (
        "winograd_wsc",
        SCHEMA | {"doc_to_target": "{{'' if continuation[0] in '.\"' else ' '}}{{continuation}}"},
    ),
    "winogrande": ("winogrande", SCHEMA),
    "lambada": ("lambada_openai", CONTINUATION | {"doc_to_text": "context", "doc_to_target": " {{continuation}}"}),
    "jeopardy": (
        "jeopardy_all",
        CONTINUATION | {"doc_to_text": "{{context}}\nAnswer:", "doc_to_target": " {{continuation}}"},
    ),
    "triviaqa": (
        "triviaqa_sm_sub",
        {"yaml": "triviaqa/default.yaml", "doc_to_text": "{{context[:-8]}}?\nAnswer:", "doc_to_target": "{{aliases}}"},
    ),
    "gsm8k": (
        "gsm8k",
        {
            "yaml": "gsm8k/gsm8k.yaml",
            "doc_to_text": "Question: {{context}}\nAnswer:",
            "doc_to_target": "{{chain_of_thought}}\n#### {{answer}}",
        },
    ),
}
"""(file, settings with which lm-evaluation-harness reads LLM Foundry's records), by task."""

NAMES = {
    "acc_sum": "acc,none",
    "acc_per_char": "acc_norm,none",
    "acc_per_byte": "acc_bytes,none",
    "acc_pmi": "acc_mutual_info,none",
    "acc": "acc,none",
    "perplexity": "perplexity,none",
    "exact_match": "exact_match,remove_whitespace",
    "strict_match": "exact_match,strict-match",
    "flexible_extract": "exact_match,flexible-extract",
    "word_perplexity": "word_perplexity,none",
    "byte_perplexity": "byte_perplexity,none",
    "bits_per_byte": "bits_per_byte,none",
}


def harness(tokenizer: TextTokenizer, folder: Path, max_length: int = 8192):
    from transformers import AutoTokenizer

    from tests.support.harness import Harness

    tokenizer.save(folder)
    return Harness(AutoTokenizer.from_pretrained(folder), max_length)


def without_pmi_premise(task: NativeTask) -> NativeTask:
    """lm-evaluation-harness's PMI scores have the empty premise."""
    if task.config.pmi is None:
        return task
    return NativeTask(task.config.model_copy(update={"pmi": ""}), task.convention, task.source, task.base)


def ours(task: NativeTask, tokenizer: TextTokenizer, shots: int, **options: Any) -> tuple[list[Request], Metrics]:
    documents = task.documents(LIMIT)
    requests = task.requests(documents, tokenizer, shots, **options)
    return requests, task.metrics(documents, requests, ask(requests))


def assert_same(theirs: Any, results: dict[str, Any], requests: list[Request], metrics: Metrics | None) -> None:
    scores = [(one.context, one.continuation) for one in requests if isinstance(one, LoglikelihoodRequest)]
    texts = [(one.context, one.stops, one.max_new_tokens) for one in requests if isinstance(one, GenerateUntilRequest)]
    assert len(scores) + len(texts) > 0
    assert scores == theirs.asked
    assert texts == theirs.generations
    if metrics is None:
        return
    compared = 0
    for name, value in metrics.values.items():
        key = NAMES.get(name)
        if key in results:
            compared += 1
            assert value.value == pytest.approx(results[key], rel=1e-9), name
            stderr = results.get(key.replace(",", "_stderr,"))
            if name != "perplexity" and isinstance(stderr, float):  # of which theirs is a bootstrap's
                assert value.stderr == pytest.approx(stderr, rel=1e-9), name
    assert compared == sum(key in NAMES.values() for key in results)


@pytest.mark.parametrize("shots", [pytest.param(0, marks=pytest.mark.ci), 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if number % 2 else pytest.mark.ci) for number, name in enumerate(LOCAL)]
)
def test_local_records(name: str, shots: int, tokenizer, tmp_path):
    check_local(name, shots, tokenizer, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("any_tokenizer", [kind for kind in TOKENIZERS if kind != "byte_level"], indirect=True)
@pytest.mark.parametrize("name", ["arc_challenge", "winogrande", "lambada", "triviaqa"])
def test_every_kind_of_tokenizer(name: str, any_tokenizer, tmp_path):
    check_local(name, 1, any_tokenizer, tmp_path)


def check_local(name: str, shots: int, tokenizer: TextTokenizer, folder: Path) -> None:
    from tests.support import harness as oracle

    file, settings = LOCAL[name]
    source = icl_file(file)
    task = without_pmi_premise(load_task(name, "lm-eval", source.parent))
    task = NativeTask(task.config, "lm-eval", task.source.model_copy(update={"path": source.name}), task.base)
    requests, metrics = ours(task, tokenizer, shots)
    theirs = harness(tokenizer, folder / "tokenizer")
    groups = categories(source, folder) if task.config.category else [source]
    results: dict[str, Any] = {}
    for group in groups:
        splits = {"test": group}
        rest = harness_settings(name)
        if "yaml" in settings:
            none = {"training_split": None, "validation_split": None, "test_split": "test"}
            config = oracle.shipped(settings["yaml"], splits, folder / "cache", **none, **rest)
        else:
            config = oracle.local(splits, folder / "cache", test_split="test", **rest)
        results = oracle.evaluate(theirs, config, shots, LIMIT)
    assert_same(theirs, results, requests, metrics if len(groups) == 1 else None)


def harness_settings(name: str) -> dict[str, Any]:
    """Examples come from the test split. Where that is named as theirs, the harness leaves out the document; where none is, as
    in its winograd and lambada, it does not.
    """
    rest = {key: value for key, value in LOCAL[name][1].items() if key != "yaml"}
    return rest if name in ("winograd", "lambada") else rest | {"fewshot_split": "test"}


def categories(source: Path, folder: Path) -> list[Path]:
    """One file for each category, in alphabetical order."""
    groups: dict[str, list[str]] = {}
    for line in source.read_text(encoding="utf-8").splitlines():
        groups.setdefault(json.loads(line)["category"], []).append(line)
    files = []
    for name in sorted(groups):
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("\n".join(groups[name]) + "\n", encoding="utf-8")
    return files


def hub_records(name: str, rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Made-up records with the columns of the hub data set that a task names."""

    def text(words: int = 6) -> str:
        return some_sentence(rng, words)

    def one() -> dict[str, Any]:
        match name:
            case "arc_easy" | "arc_challenge" | "openbook_qa":
                labels = rng.choice((["A", "B", "C", "D"], ["1", "2", "3", "4"]))
                choices = {"text": [text(3) for _ in labels], "label": labels}
                return {
                    ("question_stem" if name == "openbook_qa" else "question"): text() + "?",
                    "choices": choices,
                } | {"answerKey": rng.choice(labels)}
            case "boolq":
                return {"passage": text(20), "question": text(), "label": rng.randrange(2)}
            case "hellaswag":
                endings = [
                    rng.choice(("", " ", "[step] ")) + f"{text(4)} [title] the [substeps]  end" for _ in range(4)
                ]
                return {"activity_label": text(2), "ctx_a": f" {text()}.", "ctx_b": text(3), "endings": endings} | {
                    "label": str(rng.randrange(4))
                }
            case "piqa":
                return {
                    "goal": text() + rng.choice(("", "\n")),
                    "sol1": text(5),
                    "sol2": text(7),
                    "label": rng.randrange(2),
                }
            case "winograd":
                begin, pronoun, end = rng.choice(
                    (
                        ("The cat saw a dog because ", "it", " was big."),
                        ("We like it.  So  they said. ", "He", " did. "),
                        ("She took ", "his", " book."),
                        ("One knows that of ", "them", "."),
                    )
                )
                options = [rng.choice(("The man", "A dog", "People")), rng.choice(("His time", "water"))]
                sentence = begin + pronoun + end
                # Where the loader removes double spaces, the position stays as it was.
                return {"text": sentence, "pronoun": pronoun, "pronoun_loc": len(begin), "options": options} | {
                    "label": rng.randrange(2)
                }
            case "winogrande":
                return {
                    "sentence": f"{text(4)} _ {text(4)}. ",
                    "option1": "Ann",
                    "option2": "Bo",
                    "answer": rng.choice("12"),
                }
            case "lambada":
                return {"text": text(12)}
            case "copa":
                return {"premise": text() + ". ", "choice1": text(4), "choice2": text(3), "label": rng.randrange(2)} | {
                    "question": rng.choice(("cause", "effect"))
                }
            case "mmlu":
                return {
                    "question": f" {text()}?",
                    "choices": [text(2) for _ in range(4)],
                    "answer": rng.randrange(4),
                } | {"subject": "college_biology"}
            case "triviaqa":
                aliases = [text(2), 'It\'s "Mark"', text(1)]
                return {"question": text() + "?", "answer": {"value": aliases[0], "aliases": aliases}}
            case "gsm8k":
                return {"question": text() + "?", "answer": f"{text()}\n{text()}\n#### {rng.randrange(9)}"}
        raise AssertionError(name)

    return [one() for _ in range(count)]


HUB = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "winograd": "wsc273/default.yaml",
    "winogrande": "winogrande/default.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "copa": "super_glue/copa/default.yaml",
    "openbook_qa": "openbookqa/openbookqa.yaml",
    "mmlu": "mmlu/default/mmlu_college_biology.yaml",
    "triviaqa": "triviaqa/default.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
}


@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("name", HUB)
def test_hub_records_in_the_harness_own_tasks(name: str, shots: int, tokenizer, tmp_path):
    from tests.support import harness as oracle

    rng = random.Random(5)
    files = {}
    task = load_task(name, "lm-eval")
    splits = {task.source.split, "train", "validation", "test", "dev"} - {None}
    for split in sorted(str(split) for split in splits):
        files[split] = tmp_path / f"{split}.jsonl"
        lines = [json.dumps(record) + "\n" for record in hub_records(name, rng, 9)]
        files[split].write_text("".join(lines), encoding="utf-8")
    examples = task.source.few_shot and Examples(path=f"{task.source.few_shot.split}.jsonl")
    source = Source(path=f"{task.source.split}.jsonl", fields=task.source.fields, few_shot=examples)
    task = without_pmi_premise(NativeTask(task.config, "lm-eval", source, tmp_path))
    requests, metrics = ours(task, tokenizer, shots)
    theirs = harness(tokenizer, tmp_path / "tokenizer")
    config = oracle.shipped(HUB[name], files, tmp_path / "cache")
    if task.config.pmi is not None:
        config["metric_list"] = MULTIPLE_CHOICE["metric_list"]
    assert_same(theirs, oracle.evaluate(theirs, config, shots, LIMIT), requests, metrics)


@pytest.mark.parametrize("size", [7, 16, 1000])
def test_windows_of_a_long_text(size: int, any_tokenizer, tmp_path):
    from tests.support import harness as oracle

    rng = random.Random(3)
    texts = [some_sentence(rng, words) + "\n\nand  more" for words in (80, 1, 30)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    config = TaskConfig(name="it", type="perplexity", source=Source(path=file.name))
    requests, metrics = ours(NativeTask(config, "lm-eval", config.source, tmp_path), any_tokenizer, 0, max_seq_len=size)
    theirs = harness(any_tokenizer, tmp_path / "tokenizer", size)
    names = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    settings: dict[str, Any] = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
    settings["metric_list"] = [{"metric": name} for name in names]
    results = oracle.evaluate(
        theirs, oracle.local({"test": file}, tmp_path / "cache", test_split="test", **settings), 0, None
    )
    assert_same(theirs, results, requests, metrics)


@pytest.mark.parametrize("name", [*HUB, "wikitext", "ifeval", "bbh", "bbh_cot"])
def test_sources_are_the_harness_s(name: str):
    from tests.support.harness import TASKS, load_yaml

    new = {"wikitext": "wikitext/wikitext.yaml", "ifeval": "ifeval/ifeval.yaml"}
    path = (HUB | new).get(name) or f"bbh/{'cot_' * (name == 'bbh_cot')}zeroshot/snarks.yaml"
    theirs, source = load_yaml(TASKS / path, resolve_func=False), load_task(name, "lm-eval").source
    assert source.hub == theirs["dataset_path"]
    assert source.split == (theirs.get("test_split") or theirs["validation_split"])
    few_shot = theirs.get("fewshot_split") or theirs.get("training_split")
    if name not in ("wikitext", "ifeval"):  # which have no examples
        assert (source.few_shot and source.few_shot.split) == few_shot
    if name == "mmlu":
        assert source.config == ["all"]
    elif name in ("bbh", "bbh_cot"):
        files = sorted((TASKS / path).parent.glob("[a-z]*.yaml"))
        assert source.config == [load_yaml(file, resolve_func=False)["dataset_name"] for file in files]
    else:
        assert (source.config or [None]) == [theirs.get("dataset_name")]


def test_every_subject_of_mmlu_is_described_as_in_the_harness():
    from tests.support.harness import TASKS, load_yaml

    files = [file for file in (TASKS / "mmlu" / "default").glob("mmlu_*.yaml") if "dataset_name" in file.read_text()]
    assert len(files) == 57
    preamble = load_task("mmlu", "lm-eval").settings.preamble
    assert preamble
    for config in map(load_yaml, files):
        assert Template(preamble).text({"subject": config["dataset_name"]}) == config["description"]


def test_wikitext_is_the_harness_s(tokenizer, tmp_path):
    from tests.support import harness as oracle

    rng = random.Random(11)
    marks = (
        *(
            " @-@ ",
            " @,@ ",
            " @.@ ",
            " : ",
            " ; ",
            " . ",
            " ! ",
            " ? ",
            " , ",
            " ( a ) ",
            " ( ) ",
            " [ b ]",
            "{ c }",
            " { } ",
        ),
        *(
            ' " d " ',
            " ' e ' ",
            "s ' ",
            " 's ",
            " = = = = ",
            " = = = ",
            " = = ",
            " = ",
            " ° ",
            " \n ",
            "\n\n",
            " N ",
            "/' 7/",
            '"',
            "'",
        ),
        *("(", ")", "\u00a0", " café ", " . . . "),
    )
    pages = ["".join(some_sentence(rng, 2) + rng.choice(marks) for _ in range(60)) for _ in range(12)]
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages), encoding="utf-8")
    task = load_task("wikitext", "lm-eval")
    task = NativeTask(task.config, "lm-eval", Source(path=file.name), tmp_path)
    requests, metrics = ours(task, tokenizer, 0, max_seq_len=100)
    theirs = harness(tokenizer, tmp_path / "tokenizer", 100)
    none = {"training_split": None, "validation_split": None}
    config = oracle.shipped("wikitext/wikitext.yaml", {"test": file}, tmp_path / "cache", **none)
    assert_same(theirs, oracle.evaluate(theirs, config, 0, None), requests, metrics)
