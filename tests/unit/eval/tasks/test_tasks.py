"""Task files and records: all errors at once, with file and line."""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
import zstandard

from llmtrain.config.report import ConfigError
from llmtrain.eval.errors import EvalError
from llmtrain.eval.native_task import NativeTask, load_task
from llmtrain.eval.prompts.requests import GeneratedText, GenerateUntilRequest, Loglikelihood, LoglikelihoodRequest
from llmtrain.eval.report.process_results import process_results
from llmtrain.eval.tasks.documents import Choices, Text
from llmtrain.eval.tasks.sections import Source
from llmtrain.eval.tasks.sources import read_records
from tests.support.icl import byte_level

EVAL = Path(__file__).parents[4] / "eval"
SHIPPED = sorted(file.stem for file in (EVAL / "tasks").glob("*.yaml"))
GOOD = {"query": "Is it", "choices": ["so", "not so"], "gold": 1}


def errors(load, *arguments: Any, **settings: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(*arguments, **settings)
    return str(raised.value)


@pytest.mark.parametrize("convention", ["foundry", "lm-eval"])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tasks_load(name: str, convention: str):
    if convention == "foundry" and name in ("bbh", "bbh_cot", "ifeval"):
        with pytest.raises(EvalError, match="no prompts of convention foundry; run it with convention: lm-eval"):
            load_task(name, convention)
        return
    task = load_task(name, convention)
    assert task.name == name
    assert task.metric in task.config.metrics(task.convention)
    assert task.config.local is not None


def test_the_settings_that_results_keep():
    """Those of its convention, by which a comparison names what was changed in between; neither data nor shots."""
    made = load_task("gsm8k", "lm-eval").described()
    assert json.loads(json.dumps(made)) == made and made["lm-eval.max_new_tokens"] > 0 and "type" in made
    assert not any(key.startswith("foundry") or key.endswith(("shots", "source", "local", "name")) for key in made)


def test_all_tasks_of_the_issue_are_shipped():
    wanted = (
        "arc_challenge arc_easy bbh bbh_cot boolq copa gsm8k hellaswag ifeval jeopardy lambada mmlu openbook_qa piqa"
    )
    assert [*wanted.split(), "triviaqa", "wikitext", "winograd", "winogrande"] == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_task_is_in_the_readme_with_its_source(name: str):
    [row] = [line for line in (EVAL / "README.md").read_text().splitlines() if line.startswith(f"| `{name}` |")]
    source = load_task(name, "lm-eval").source
    assert (source.hub or "no copy on the hub") in row
    assert source.split is None or f"{source.split}" in row


@pytest.mark.parametrize("name", ["schema.json", "tasks/schema.json", "gauntlets/schema.json"])
def test_editors_know_every_shipped_file(name: str):
    schema = json.loads((EVAL / name).read_text())
    for file in (EVAL / name).parent.glob("*.yaml"):
        assert file.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
        jsonschema.validate(yaml.safe_load(file.read_text()), schema)


def test_a_task_of_four_lines(make, tokenizer):
    task = make([GOOD, GOOD | {"gold": 0}])
    documents = task.documents()
    assert [document.content for document in documents.evaluated] == [
        Choices("Is it", ("so", "not so"), 1),
        Choices("Is it", ("so", "not so"), 0),
    ]
    first, *_ = task.requests(documents, tokenizer)
    assert isinstance(first, LoglikelihoodRequest)
    assert tokenizer.decode([*first.context, *first.continuation]) == "Is it so"


def test_every_mistake_is_reported_at_once(make):
    text = errors(
        make,
        [],
        name="a b",
        querry="{{x}}",
        choices="{{choices",
        continuation="{{rest}}",
        foundry={"metric": "acc_norm", "stops": ["\n"]},
        lm_eval={"example_delimiter": 3, "sampler": "frist_n", "few_shot_from": "few_shot"},
        source={"path": "x.jsonl", "split": "test", "fields": {"y": "{% if %}"}},
    )
    for line in (
        "expected letters, digits",
        "unknown key; did you mean query?",
        "not a template",
        "not of a task of type multiple_choice, which has query, choices, gold",
        "foundry.metric",
        "expected one of acc_per_byte",
        "foundry.stops",
        "has no effect on a task of type multiple_choice",
        "lm_eval.example_delimiter",
        "expected a string, found 3",
        "did you mean first_n?",
        "source.split",
        "source.fields.y",
    ):
        assert line in text, line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "a/b"}, "expected letters, digits"),
        ({"type": "schema", "pmi": "Answer:"}, "PMI scores are for type multiple_choice"),
        ({"type": "perplexity", "shots": [3]}, "has no few-shot examples"),
        ({"source": {"hub": "a/b"}}, "a hub data set needs its split"),
        ({"source": {"hub": "a/b", "split": "test", "path": "x"}}, "a source has one place"),
        ({"source": {}}, "a source needs path (a JSONL file), hub, mds or text"),
        ({"source": {"text": "x.txt"}}, "a text file is for type perplexity"),
        ({"source": {"path": "x.jsonl", "few_shot": {"split": "train"}}}, "this source needs `path` there"),
        ({"local": {"hub": "a/b", "split": "test"}}, "local is a file or folder below --data-dir"),
        ({"lm_eval": {"few_shot_from": "few_shot"}}, "no source says where examples are"),
        ({"type": "generation", "lm_eval": {"extract": {"a": {"pattern": "("}}}}, "not a regular expression"),
        ({"type": "generation", "foundry": {"stops": [""]}}, "would end every answer at once"),
        ({"type": "generation", "labels": ["A"]}, "labels are for types multiple_choice and schema"),
        ({"shots": []}, "shots"),
        (
            {"type": "generation", "lm_eval": {"extract": {"a": {"pattern": "a", "categories": ["x"]}}}},
            "the task has no category",
        ),
        (
            {"type": "generation", "lm_eval": {"extract": {"a": [{"type": "numbr"}]}}},
            "unknown type; did you mean number?",
        ),
        ({"type": "generation", "lm_eval": {"extract": {"a": [{"type": "map"}]}}}, "missing; expected a mapping"),
        (
            {"type": "generation", "lm_eval": {"extract": {"a": {"type": "word_order"}}}},
            "word_order looks for choices, but the task has no choices",
        ),
        ({"type": "generation", "lm_eval": {"extract": {"a": "lowercase"}}}, "lm_eval.extract.a"),
        ({"lm_eval": {"max_new_tokens": 9}}, "has no effect on a task of type multiple_choice"),
        ({"type": "instructions"}, "LLM Foundry checks no instructions; write conventions: [lm-eval]"),
        ({"type": "instructions", "shots": [1]}, "a task of instructions has no few-shot examples"),
        ({"type": "instructions", "lm_eval": {"ignore_case": True}}, "has no effect on a task of type instructions"),
        ({"conventions": []}, "conventions"),
    ],
)
def test_rules_between_settings(make, settings, message):
    assert message in errors(make, [], **settings)


def test_an_empty_file_explains_what_a_task_needs(tmp_path):
    (tmp_path / "none.yaml").write_text("\n")
    assert "is empty; it needs name, type, source" in errors(load_task, tmp_path / "none.yaml", "foundry")


@pytest.mark.parametrize(
    ("line", "settings", "message"),
    [
        (
            '{"query": "q", "gold": 0}',
            {},
            "x.jsonl:3: `choices`: field `choices` is missing (there are: `query`, `gold`)",
        ),
        (GOOD | {"choices": ["a", " "]}, {}, "x.jsonl:3: `choices` 1 (from 0) is empty"),
        (GOOD | {"choices": ["a"]}, {}, "x.jsonl:3: `choices` has 1 of the at least two alternatives"),
        (GOOD | {"choices": ["a", 3]}, {}, "x.jsonl:3: `choices` 1 is 3; expected a list of texts"),
        (GOOD | {"gold": 2}, {}, "x.jsonl:3: `gold` is 2, but there are 2 alternatives, counted from 0"),
        (GOOD | {"gold": -1}, {}, "x.jsonl:3: `gold` is -1"),
        (GOOD | {"gold": True}, {}, "x.jsonl:3: `gold` is True"),
        (GOOD | {"gold": "C"}, {"labels": ["A", "B"]}, "expected one of the labels A, B"),
        (GOOD | {"gold": None}, {}, "x.jsonl:3: `gold` is None"),
        (GOOD | {"query": None}, {}, "x.jsonl:3: `query`: expected text from the template '{{query}}', found null"),
        (GOOD, {"query": "{{query.words[0]}}"}, "x.jsonl:3: `query`: "),
        ('{"query": "q"', {}, "x.jsonl:3: not JSON: "),
        ("[1]", {}, "x.jsonl:3: expected an object, found list"),
    ],
)
def test_bad_records(make, line, settings, message):
    good = GOOD if "labels" not in settings else GOOD | {"gold": "A"}
    if "words" in settings.get("query", ""):
        good = GOOD | {"query": {"words": ["a"]}}
    with pytest.raises(EvalError) as raised:
        make([good, "", line], **settings).documents()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("gold", "labels", "number"),
    [
        ("B", ["A", "B"], 1),
        ("1", None, 1),
        (0, None, 0),
        ("not so", None, 1),
        ("2", ["1", "2"], 1),
        (1, ["1", "2"], 0),
        (1, ["A", "B"], 1),
    ],
)
def test_ways_to_say_which_is_right(make, gold, labels, number):
    task = make([GOOD | {"gold": gold}], **({"labels": labels} if labels else {}))
    assert task.documents().evaluated[0].content.gold == number


def test_a_number_that_is_also_a_choice_is_not_guessed(make):
    with pytest.raises(EvalError, match="may be a number or the text of alternative 0"):
        make([GOOD | {"choices": ["1", "0"], "gold": "1"}]).documents()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_stand_for_plain_ones(make, tmp_path, suffix):
    task = make([GOOD] * 3)
    data = (tmp_path / "x.jsonl").read_bytes()
    (tmp_path / "x.jsonl").unlink()
    packed = gzip.compress(data) if suffix == ".gz" else zstandard.compress(data)
    (tmp_path / f"x.jsonl{suffix}").write_bytes(packed)
    assert [document.where for document in task.documents().evaluated][-1] == f"{tmp_path}/x.jsonl{suffix}:3"
    (tmp_path / f"x.jsonl{suffix}").write_bytes(packed[:-7])
    with pytest.raises(EvalError, match=r"x\.jsonl"):
        task.documents()


def test_missing_files_and_names(make, tmp_path):
    task = make([GOOD])
    (tmp_path / "x.jsonl").rename(tmp_path / "xx.jsonl")
    with pytest.raises(EvalError, match=rf"task {task.name}: .*x.jsonl: no such file; did you mean xx.jsonl\?"):
        task.documents()
    with pytest.raises(EvalError, match="did you mean arc_easy"):
        load_task("arc_eazy", "foundry")
    with pytest.raises(EvalError, match=r"unknown convention 'lm_eval'; did you mean lm-eval\?"):
        load_task("arc_easy", "lm_eval")
    with pytest.raises(ConfigError, match="no such file"):
        load_task(tmp_path / "nine.yaml", "foundry")


def test_hub_data_sets(make, tmp_path, monkeypatch):
    """`datasets` reads a folder as it reads a repository of the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "quiz").mkdir()
    (tmp_path / "quiz" / "test.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in (GOOD, GOOD | {"gold": 9})))
    hub = str(tmp_path / "quiz")
    task = make([], source={"hub": hub, "split": "test[:1]"})
    [document] = task.documents().evaluated
    assert (document.content.query, document.where) == (GOOD["query"], f"{hub} [test[:1]]:1")
    with pytest.raises(EvalError, match=r"quiz \[test\]:2: `gold` is 9"):
        make([], source={"hub": hub, "split": "test"}).documents()
    with pytest.raises(EvalError, match=r"quiz \[dev\]: the Hugging Face hub did not give it: .*--data-dir"):
        make([], source={"hub": hub, "split": "dev"}).documents()


def test_rows_of_mds_shards(tmp_path, tokenizer):
    from streaming import MDSWriter

    columns = {"query": "str", "choices": "json", "gold": "int"}
    with MDSWriter(columns=columns, out=str(tmp_path / "shards"), compression="zstd") as writer:
        for number in range(5):
            writer.write(GOOD | {"query": f"number {number}"})
    (tmp_path / "it.yaml").write_text("{name: it, type: multiple_choice, source: {mds: shards}}")
    documents = load_task(tmp_path / "it.yaml", "foundry").documents().evaluated
    assert [document.content.query for document in documents] == [f"number {n}" for n in range(5)]  # type: ignore[union-attr]
    assert documents[3].where.endswith("shard.00000.mds:3")
    assert not list((tmp_path / "shards").glob("*.mds")), "reading must not unpack into the folder"


def test_too_few_examples_is_an_error(make, tokenizer):
    records = [GOOD | {"query": f"Is it {number}", "kind": "a" if number else "b"} for number in range(4)]
    for convention in ("foundry", "lm-eval"):
        task = make(records, convention)
        with pytest.raises(EvalError, match="4 few-shot examples asked for, but there are only 3 besides the document"):
            task.requests(task.documents(), tokenizer, 4)
        task = make(records, convention, category="{{kind}}")
        with pytest.raises(EvalError, match="of category 'b'"):
            task.requests(task.documents(), tokenizer, 2)
    for sampler in ("default", "first_n"):  # lm-evaluation-harness leaves out copies of the document too
        task = make([GOOD] * 3 + records[:1], lm_eval={"sampler": sampler})
        with pytest.raises(EvalError, match=r"x.jsonl:1: 2 few-shot examples asked for, but only 1 records differ"):
            task.requests(task.documents(), tokenizer, 2)


def test_context_and_continuation_of_plain_records_do_not_run_together(make, tokenizer):
    """A task's own template gets no delimiter, as in lm-evaluation-harness."""
    records = [{"context": "Is it", "continuation": word} for word in ("!", " so")]

    def texts(**settings: Any) -> list[str]:
        task = make(records, type="language_modeling", **settings)
        made = task.requests(task.documents(), tokenizer)
        return [
            tokenizer.decode([*one.context, *one.continuation]) for one in made if isinstance(one, LoglikelihoodRequest)
        ]

    assert texts() == ["Is it !", "Is it so"]
    assert texts(lm_eval={"continuation_delimiter": "\n"})[0] == "Is it\n!"
    assert texts(lm_eval={"continuation": "{{continuation}}"}) == ["Is it!", "Is it so"]


@pytest.mark.parametrize(
    "convention, section, stops",
    [
        ("lm-eval", {}, ("\n\n",)),
        ("lm-eval", {"example_delimiter": "##"}, ("##",)),
        ("lm-eval", {"example_delimiter": ""}, ()),
        ("lm-eval", {"stops": []}, ()),
        ("lm-eval", {"stops": ["."]}, (".",)),
        ("foundry", {}, ()),
    ],
)
def test_an_answer_ends_where_the_next_example_would_begin(make, tokenizer, convention, section, stops):
    """Default of lm-evaluation-harness's `until`."""
    settings = {convention.replace("-", "_"): section}
    task = make([{"context": "Is it", "answer": "so"}], convention, type="generation", **settings)
    [request] = task.requests(task.documents(), tokenizer)
    assert isinstance(request, GenerateUntilRequest) and request.stops == stops
    per_document = task.metrics(task.documents(), [request], [GeneratedText("so\n\nand")])
    assert per_document.score.value == (1.0 if "\n\n" in stops or convention == "foundry" else 0.0)


def test_half_a_character_is_named_with_its_line(make):
    task = make([GOOD, json.dumps(GOOD | {"query": "Is \ud83d it"}), GOOD])
    with pytest.raises(EvalError, match=r"x\.jsonl:2: \\ud83d is half of a character"):
        task.documents()
    assert make([json.dumps(GOOD | {"query": "Is \U0001f600 it"})]).documents().evaluated


def test_examples_from_another_file(make, tokenizer, tmp_path):
    examples = [GOOD | {"query": "Example"}] * 2
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, examples)))
    source = {"path": "x.jsonl", "few_shot": {"path": "train.jsonl"}}
    task = make([GOOD] * 3, source=source)
    request = task.requests(task.documents(), tokenizer, 2)[0]
    assert tokenizer.decode(request.context) == "Example not so\n\nExample not so\n\nIs it"
    own = make([GOOD] * 3, "foundry", source=source)
    request = own.requests(own.documents(), tokenizer, 2)[0]
    assert tokenizer.decode(request.context) == "Is it not so\nIs it not so\nIs it"


def test_an_empty_prompt_needs_a_tokenizer_with_bos(make, tokenizer):
    record = {"context": "", "continuation": "so it is"}
    task = make([record], "foundry", type="language_modeling")
    with pytest.raises(EvalError, match=r"x.jsonl:1: the prompt is empty, and this tokenizer puts no BOS before it"):
        task.requests(task.documents(), tokenizer)
    with_bos = byte_level(bos=True)
    [request] = task.requests(task.documents(), with_bos)
    assert request.context == (with_bos.backend.token_to_id("<s>"),)
    task = make([record], "lm-eval", type="language_modeling")
    [request] = task.requests(task.documents(), tokenizer)
    assert request.context == (tokenizer.eod_id,), "lm-evaluation-harness takes EOS for want of BOS"


@pytest.mark.parametrize("convention, most", [("foundry", 19), ("lm-eval", 20)])
def test_what_does_not_fit_the_model_is_reported_with_its_line(make, tokenizer, convention, most):
    """LLM Foundry counts the last token, which is predicted but not read, as part of the window; lm-evaluation-harness does not."""

    def check(task: NativeTask, window: int) -> None:
        documents = task.documents()
        task.check_lengths(documents, task.requests(documents, tokenizer), window)

    one, long = ({"context": "Is it", "continuation": " so" * n} for n in (1, 40))
    task = make([one, long], convention, type="language_modeling")
    n = len(task.requests(task.documents(), tokenizer)[1].continuation)
    check(task, n + 20 - most)
    with pytest.raises(EvalError, match=rf"task mine: \S*x.jsonl:2: the model reads 20 tokens, and a continuation of {n} "
                       rf"tokens does not fit \(at most {most} of them\); leave the document out"):  # fmt: skip
        check(task, 20)
    asked = {"context": "Is it", "answer": "so"}
    task = make([asked], convention, type="generation")
    [request] = task.requests(task.documents(), tokenizer)
    longest = request.max_new_tokens
    check(task, longest + 1)
    with pytest.raises(
        EvalError, match=rf"task mine: .* an answer of up to {longest} tokens does not fit .* lower max"
    ):
        check(task, longest)


def test_pmi_requests_come_last_and_can_be_left_out(make, tokenizer):
    task = make([GOOD] * 2, "foundry", pmi="Answer:")
    documents = task.documents()
    requests = task.requests(documents, tokenizer)
    assert [(one.document, one.option) for one in requests if isinstance(one, LoglikelihoodRequest)] == [
        (document, option) for document in range(2) for option in range(4)
    ]
    assert tokenizer.decode(requests[2].context) == "Answer:"
    assert task.requests(documents, tokenizer, pmi=False) == [one for one in requests if one.option < 2]


def test_limits_count_in_each_category(make, tokenizer):
    task = make([GOOD | {"kind": kind} for kind in "babab"], category="{{kind}}")
    documents = task.documents(limit=1)
    assert [document.category for document in documents.evaluated] == ["a", "b"]
    assert [document.index for document in documents.evaluated] == [1, 0]
    assert len(documents.everything) == 5


def test_templates_cannot_reach_the_machine(make):
    with pytest.raises(EvalError, match=r"x.jsonl:1: `query`: .*unsafe"):
        make([GOOD], query="{{''.__class__.__mro__}}").documents()


def test_generation_ends_where_the_convention_states(make, tokenizer):
    record = {"context": "Name it", "answer": "of the words", "aliases": ["a"]}
    settings = {"type": "generation", "foundry": {"stops": ["\n"]}, "lm_eval": {"stops": ["."], "max_new_tokens": 7}}
    longest = len(tokenizer.encode("of the words"))
    for convention, stops, length in (("foundry", ("\n",), longest), ("lm-eval", (".",), 7)):
        task = make([record], convention, **settings)
        [request] = task.requests(task.documents(), tokenizer)
        assert request == GenerateUntilRequest(0, tuple(tokenizer.encode("Name it")), stops, length)


def test_several_configurations_of_a_hub_data_set_are_read_in_order(monkeypatch):
    import datasets

    rows = {"b": [{"q": 1}, {"q": 2}], "a": [{"q": 3}]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: rows[config])
    several = Source(hub="x/y", config=["b", "a"], split="test")
    assert [(record.where, record.data) for record in read_records(several, Path())] == [
        ("x/y (b) [test]:1", {"q": 1, "config": "b"}),
        ("x/y (b) [test]:2", {"q": 2, "config": "b"}),
        ("x/y (a) [test]:1", {"q": 3, "config": "a"}),
    ]
    one = Source.model_validate({"hub": "x/y", "config": "a", "split": "test"})
    assert [record.data for record in read_records(one, Path())] == [{"q": 3}]


IFEVAL = {"prompt": "Do it.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kwargs": []}, "x.jsonl:2: 1 `instructions` have 0 `arguments`; expected one each, at least one"),
        ({"instruction_id_list": [], "kwargs": []}, "x.jsonl:2: 0 `instructions` have 0 `arguments`"),
        ({"instruction_id_list": ["no_comma"]}, "x.jsonl:2: unknown instruction 'no_comma'"),
        ({"prompt": " "}, "x.jsonl:2: `context` is empty"),
    ],
)
def test_bad_records_of_instructions(make, record, message):
    with pytest.raises(EvalError) as raised:
        make([IFEVAL, IFEVAL | record], type="instructions", conventions=["lm-eval"]).documents()
    assert message in str(raised.value)


def test_instructions_are_asked_as_they_are_and_need_their_libraries_first(make, tokenizer, monkeypatch):
    records = [IFEVAL, IFEVAL | {"instruction_id_list": ["change_case:english_capital"]}]
    task = make(records, type="instructions", conventions=["lm-eval"], lm_eval={"stops": [], "max_new_tokens": 7})
    documents = task.documents(limit=1)
    [request] = task.requests(documents, tokenizer)
    assert isinstance(request, GenerateUntilRequest)
    assert (tokenizer.decode(request.context), request.stops, request.max_new_tokens) == ("Do it.", (), 7)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    task.check_shots(documents, 0)
    with pytest.raises(EvalError, match="task mine: change_case:english_capital is checked with langdetect"):
        task.check_shots(task.documents(), 0)


def test_words_and_bytes_of_a_perplexity_are_those_of_the_original(make):
    task = make([{"text": "a , b"}], type="perplexity", text="{{text | replace(' , ', ', ')}}", original="{{text}}")
    [document] = task.documents().evaluated
    assert document.content == Text("a, b", "a , b")
    made = process_results(document, [Loglikelihood(-6.0, True, 2)], task.settings)
    assert (made.values["word_perplexity"], made.values["byte_perplexity"]) == ((-6.0, 3.0), (-6.0, 5.0))
