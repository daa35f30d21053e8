"""The YAML of an evaluation."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from llmtrain.config.report import ConfigError
from llmtrain.eval.choices import ModelChoice
from llmtrain.eval.run_config import EvalRun, load_eval_run, task_runs
from scripts.generate_reference import plain_json_schema

EVAL = Path(__file__).parents[3] / "eval"


@pytest.fixture
def file(tmp_path) -> Path:
    content = {
        "name": "mine",
        "models": ["runs/a", {"path": "runs/b", "name": "other", "backend": "transformers"}],
        "tasks": ["piqa", {"task": "arc_easy", "shots": [0, 5]}],
    }
    path = tmp_path / "eval.yaml"
    path.write_text(json.dumps(content))
    return path


def test_texts_stand_for_models_and_tasks(file):
    run = load_eval_run(file)
    assert [(one.title, one.backend) for one in run.chosen_models()] == [("a", "auto"), ("other", "transformers")]
    assert [one.title for one in task_runs(run, None)] == ["piqa (0-shot)", "arc_easy (0-shot)", "arc_easy (5-shot)"]
    assert (run.out, run.cache) == ("results/mine", "results/mine/cache")


def test_a_model_of_the_command_line_takes_the_place_of_the_files(file):
    assert [one.path for one in load_eval_run(file, ["model=runs/c"]).chosen_models()] == ["runs/c"]
    assert [one.path for one in load_eval_run(file, ["model=[x, y]"]).chosen_models()] == ["x", "y"]
    assert load_eval_run(file, ["models.1.name=z"]).chosen_models()[1].title == "z"


def test_a_model_may_be_a_mapping_wherever_it_may_be_a_path(file):
    for one in ("{path: runs/c, ema: true}", "[{path: runs/c, ema: true}]"):
        assert load_eval_run(file, [f"model={one}"]).chosen_models() == [ModelChoice(path="runs/c", ema=True)]
    with pytest.raises(ConfigError, match=r"model .*expected a path, a mapping with path, or a list of these, found 3"):
        load_eval_run(file, ["model=3"])
    with pytest.raises(ConfigError, match=r"model\.0\.pth .*unknown key; did you mean path"):
        load_eval_run(file, ["model={pth: runs/c}"])


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("runs/mine", "mine"),
        ("runs/mine/", "mine"),
        ("runs/mine/checkpoints/step-00000300", "mine/step-00000300"),
        ("EleutherAI/pythia-160m", "pythia-160m"),
        (".", "."),
    ],
)
def test_what_a_model_is_called(path, title):
    assert ModelChoice(path=path).title == title
    assert ModelChoice(path=path, ema=True).title == f"{title}-ema"


def test_every_error_at_once(file):
    overrides = ["modles=[a]", "limit=-1", "tasks.1.shot=[1]", "convention=harness"]
    with pytest.raises(ConfigError) as error:
        load_eval_run(file, overrides)
    said = str(error.value)
    assert all(part in said for part in ("modles", "did you mean models", "limit", "tasks.1.shot", "convention")), said


def test_a_training_config_is_reported_as_that(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: tiny\nmodel: {d_model: 8}\ntrain: {duration: 3 steps}\noptimizer: {lr: 1e-3}\n")
    with pytest.raises(ConfigError) as error:
        load_eval_run(path)
    assert str(error.value) == (
        f"{path}: is a config for training (it has train, optimizer); give one with tasks, such as quick, "
        "and what was trained as model=RUN_FOLDER"
    )


def test_an_empty_file(tmp_path):
    (tmp_path / "e.yaml").write_text("\n")
    with pytest.raises(ConfigError, match="is empty; it needs tasks, or a gauntlet"):
        load_eval_run(tmp_path / "e.yaml")


def test_two_tasks_of_one_name_are_distinguished_or_refused(tmp_path, file):
    for name in ("one", "two"):
        task = {"name": "same", "type": "schema", "source": {"path": "x.jsonl"}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    with pytest.raises(ConfigError, match=r"one\.yaml and .*two\.yaml are both called 'same'; rename one of them"):
        load_eval_run(file, [f"tasks=[{tmp_path}/one.yaml, {tmp_path}/two.yaml]"])
    (tmp_path / "sub").mkdir()
    run = load_eval_run(file, [f"tasks=[{tmp_path}/one.yaml, {tmp_path}/sub/../one.yaml]"])
    assert [one.title for one in task_runs(run, None)] == ["same (0-shot)"]


def test_shipped_files_fit_the_schema_that_editors_use(file):
    schema = json.loads(plain_json_schema(EvalRun))
    for path in [*EVAL.glob("*.yaml"), file]:
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"tasks": [{"tsak": "piqa"}]}, schema)
    assert EvalRun.model_validate({"tasks": ["piqa"]}).tasks[0].task == "piqa"
