"""What entries of `tasks` name: files, names, groups, tags and patterns; ours and lm-evaluation-harness's."""

import json
from pathlib import Path

import pytest

from llmtrain.config.report import ConfigError
from llmtrain.config.shipped import eval_yamls
from llmtrain.eval import task_names
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval import index, settings
from llmtrain.eval.report.gauntlet import load_gauntlet
from llmtrain.eval.run_config import EvalRun, group_runs, load_eval_run, task_runs
from llmtrain.eval.task_names import TaskNames
from tests.support.task_files import write_files

DATA = "dataset_path: json\ndataset_kwargs: {data_files: {test: data.jsonl}}\ntest_split: test\n"
CHOICE = f"{DATA}output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: c\ndoc_to_target: g\n"
FILES = {
    "quiz_a.yaml": f"task: quiz_a\ntag: quizzes\n{CHOICE}",
    "quiz_b.yaml": f"task: quiz_b\ntag: quizzes\nnum_fewshot: 2\n{CHOICE}",
    "all.yaml": "group: all_quizzes\ntask: [quiz_a, {task: quiz_b, num_fewshot: 3}]\n",
    "more.yaml": "group: more\ntask: [all_quizzes, piqa]\nnum_fewshot: 1\n",
    "piqa.yaml": f"task: piqa\n{CHOICE}",
    "code.yaml": f"task: code\nprocess_docs: !function utils.docs\n{CHOICE}",
    "python.yaml": "task: python\nclass: !function task.Python\n",
    "odd.yaml": "group: odd\ntask: [{task: quiz_a, description: other}]\n",
    "part.yaml": CHOICE,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the harness's files; the harness itself is not installed."""
    monkeypatch.setattr(index, "installed_folder", lambda: None)
    monkeypatch.chdir(tmp_path)
    return write_files(tmp_path / "tasks", FILES)


def found(folder: Path, text: str) -> list[str]:
    """Names, `ours:` before those of our files."""
    named = TaskNames([folder]).find(text)
    return [f"ours:{one.stem}" if isinstance(one, Path) else one.name for one in named]


def refused(folder: Path, text: str) -> str:
    with pytest.raises(EvalError) as error:
        TaskNames([folder]).find(text)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("quiz_a", ["quiz_a"]),
        ("all_quizzes", ["all_quizzes"]),
        ("quizzes", ["quiz_a", "quiz_b"]),
        ("quiz_*", ["quiz_a", "quiz_b"]),
        ("*quizzes", ["all_quizzes", "quiz_a", "quiz_b"]),
        ("piqa", ["ours:piqa"]),
        ("piq?", ["ours:piqa"]),
        ("lm_eval:piqa", ["piqa"]),
        ("lm_eval:piq*", ["piqa"]),
        ("tasks/quiz_a.yaml", ["quiz_a"]),
        ("tasks/all.yaml", ["all_quizzes"]),
        ("tasks/quiz_*.yaml", ["quiz_a", "quiz_b"]),
    ],
)
def test_what_a_text_names(folder, text, names):
    assert found(folder, text) == names


def test_a_file_of_ours_is_reported_by_its_keys(folder, tmp_path):
    (tmp_path / "ours.yaml").write_text('{"name": "mine", "type": "schema", "source": {"path": "x.jsonl"}}')
    assert found(folder, "ours.yaml") == ["ours:ours"]
    assert found(folder, str(eval_yamls("tasks")["piqa"])) == ["ours:piqa"]
    (tmp_path / "include.yaml").write_text("include: tasks/part.yaml\ntask: included\n")
    assert found(folder, "include.yaml") == ["included"]
    assert not task_names.is_lm_eval_file(Path("nowhere.yaml"))


def test_the_tasks_of_a_groups_file_are_found_beside_it(folder):
    [group] = TaskNames().find("tasks/all.yaml")
    assert not isinstance(group, Path) and group.name == "all_quizzes"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quiz_c", "there is no task 'quiz_c': of lm-evaluation-harness's, did you mean quiz_"),
        ("piqqa", "there is no task 'piqqa': did you mean piqa?"),
        ("zzz*", "no task matches 'zzz*': of lm-evaluation-harness's, none of the 9 in"),
        ("lm_eval:hellaswag", "there is no task 'hellaswag': of lm-evaluation-harness's, none of"),
        ("none/*.yaml", "there is no file none/*.yaml"),
        ("python", "makes it a Python class"),
    ],
)
def test_a_text_that_names_nothing(folder, text, said):
    assert said in refused(folder, text)


def test_a_folder_is_no_task(folder):
    assert f"{folder} is a folder; {folder}/*.yaml names all task files in it" in refused(folder, str(folder))


def test_without_a_harness_its_names_are_reported_to_need_one(folder):
    with pytest.raises(EvalError) as error:
        TaskNames().find("mmlu_x")
    assert "mmlu" in str(error.value)
    with pytest.raises(EvalError, match=r"found where it is installed, or with lm_eval_folders: \[FOLDER\]"):
        TaskNames().find("zzzzzz")


# --- in a run ---


def run(folder: Path, *tasks: object, **changes: object) -> EvalRun:
    file = folder.parent / "eval.yaml"
    file.write_text(json.dumps({"tasks": tasks, "lm_eval_folders": [str(folder)], **changes}))
    return load_eval_run(file, needs_models=False)


def titles(of: EvalRun) -> list[str]:
    return [one.title for one in task_runs(of, None)]


def test_tasks_run_with_their_own_shots_or_those_of_the_entry(folder):
    assert titles(run(folder, "all_quizzes")) == ["quiz_a (0-shot)", "quiz_b (3-shot)"]
    assert titles(run(folder, "more")) == ["quiz_a (1-shot)", "quiz_b (3-shot)", "piqa (1-shot)"]
    assert titles(run(folder, {"task": "quizzes", "shots": [0, 5]})) == [
        *("quiz_a (0-shot)", "quiz_a (5-shot)", "quiz_b (0-shot)", "quiz_b (5-shot)")
    ]


def test_a_task_that_is_named_several_times_runs_once(folder):
    assert titles(run(folder, "quiz_a", "quizzes", "quiz_*")) == ["quiz_a (0-shot)", "quiz_b (2-shot)"]


def test_groups_are_reported_under_the_outermost(folder):
    groups = group_runs(run(folder, "all_quizzes", "more", {"task": "all_quizzes", "shots": [0, 5]}))
    assert [(one.group.name, one.shots) for one in groups] == [("more", None), ("all_quizzes", 0), ("all_quizzes", 5)]


def problems(folder: Path, *tasks: object, **settings: object) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as error:
        run(folder, *tasks, **settings)
    return [(problem.path, problem.message) for problem in error.value.problems]


def test_all_that_is_wrong_is_reported_with_key_and_file_before_data_are_read(folder):
    [first, second, third] = problems(folder, "quiz_a", "python", "code", {"task": "quiz_x", "shots": [1]})
    assert first[0] == "tasks.1" and f"{folder}/python.yaml" in first[1]
    assert second[0] == "tasks.2" and "process_docs" in second[1] and "utils.docs" in second[1]
    assert third[0] == "tasks.3" and "there is no task 'quiz_x'" in third[1]


def test_of_many_tasks_that_cannot_run_some_are_named(folder):
    for number in range(8):
        (folder / f"bad_{number}.yaml").write_text(f"task: bad_{number}\nuse_prompt: promptsource:x\n{CHOICE}")
    [(path, message)] = problems(folder, "*_*")
    assert path == "tasks.0" and message.startswith("8 of ") and message.endswith("and 3 more")
    assert message.count("use_prompt") == 5


def test_two_tasks_of_one_name_are_refused(folder):
    [(path, message)] = problems(folder, "piqa", "lm_eval:piqa")
    assert path == "tasks.1" and "are both called 'piqa'; rename one of them, or run them apart" in message
    [(path, message)] = problems(folder, "quiz_a", "odd")
    assert path == "tasks.1" and "task quiz_a is asked for twice, with another description" in message


def test_the_foundry_convention_has_no_files_of_the_harness(folder):
    [(path, message)] = problems(folder, "quiz_a", convention="foundry")
    assert path == "tasks.0" and "it has no convention foundry" in message


def test_a_folder_that_is_not_there(folder):
    found = problems(folder, "quiz_a", lm_eval_folders=["nowhere"], allow_code=["tasks", "tasks/all.yaml"])
    assert found == [("lm_eval_folders", "no such folder"), ("allow_code", "is a file; name its folder")]


def test_a_gauntlet_names_tasks_of_the_harness_but_no_groups(folder):
    def gauntlet(task: str) -> str:
        benchmark = {"task": str(folder / task), "shots": 1, "baseline": 0.25}
        file = folder / "gauntlet.yaml"
        file.write_text(json.dumps({"name": "g", "categories": {"all": [benchmark]}}))
        return str(file)

    file = gauntlet("quiz_a.yaml")
    found = task_runs(run(folder, gauntlet=file), load_gauntlet(file))
    assert [one.title for one in found] == ["quiz_a (1-shot)"]
    [(path, message)] = problems(folder, gauntlet=gauntlet("all.yaml"))
    assert path == "gauntlet" and "is a group; a gauntlet names its tasks" in message
    [(_, message)] = problems(folder, gauntlet=gauntlet("code.yaml"))
    assert "process_docs is code" in message


def test_without_lm_eval_its_tasks_are_refused_and_the_extra_named(folder, monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    [(path, message)] = problems(folder, "quiz_a")
    assert path == "tasks.0" and "not installed: pip install 'llmtrain[lm-eval]'" in message
