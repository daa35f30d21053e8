"""The examples of docs/extending, applied as they are printed to a copy of the tree, and its commands run there."""

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from tests.support.contributing import FIRST, PAGES, ROOT, Example, PageError, Ran, parse, run_in_one_process
from tests.support.processes import LLMTRAIN, output_of

EXAMPLES = {example.title: example for path in (FIRST, *PAGES) if (example := parse(path.read_text(encoding="utf-8")))}
TRAINED = {
    "A mixer": "gated_conv",
    "A feed-forward layer": "sparse",
    "An attention backend": "blockwise",
    "A model family": "arcee",
    "An optimizer": "lion",
}
pytestmark = pytest.mark.ci
VERBS = ("check", "train", "generate", "eval", "describe")
REFUSED = {
    "uv run llmtrain check try/run.yaml model.blocks.x.backend=blockwise data.mask_documents=true": "documents apart",
    "uv run llmtrain train try/run.yaml name=lion train.duration='8 steps'": "optimizer.type: lion -> adamw",
    "uv run llmtrain export try/sparse try/sparse-exported": "model.blocks.x.mlp.type = sparse",
    "uv run llmtrain check try/run.yaml model.blocks.x.mlp.type=sparse train.parallel.tensor=2": "of type sparse, cannot",
    "uv run llmtrain check try/run.yaml 'model.blocks.x.mlp={type: sparse, d_ff: 8}'": "leaves no channel of d_ff (8)",
    "uv run llmtrain check try/run.yaml model.blocks.x.mlp.type=sparse train.activation_checkpointing.mlp_tokens=8": "reads whole",
}
"""Commands that are run after those of the page, and a part of their refusal."""


def copy_tree(folder: Path) -> Path:
    for name in ("llmtrain", "scripts", "yamls", "eval", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(tree: Path, commands: Iterable[str]) -> dict[str, Ran]:
    """Results of commands run in one process; llmtrain's through the function that `python -m llmtrain.cli` calls."""
    return {one.command: one for one in run_in_one_process(tree, commands)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The tree with all examples in it."""
    folder = copy_tree(tmp_path_factory.mktemp("contributing"))
    for example in EXAMPLES.values():
        example.apply(folder)
    return folder


@pytest.fixture(scope="module")
def ran(tree) -> dict[str, Ran]:
    commands = [command for example in EXAMPLES.values() for command in example.commands]
    return run(tree, dict.fromkeys([*commands, *REFUSED]))


def output(ran: dict[str, Ran], title: str, verb: str) -> list[str]:
    """Texts that an example's commands of one verb printed."""
    return [ran[command].text for command in EXAMPLES[title].commands if f"llmtrain {verb} " in command]


def losses(tree: Path, name: str) -> list[float]:
    """Training losses by step."""
    lines = (tree / "try" / name / "metrics.jsonl").read_text().splitlines()
    return [row["loss/train/total"] for row in map(json.loads, lines) if "loss/train/total" in row]


@pytest.mark.parametrize("title", EXAMPLES)
def test_every_command_works(ran, title):
    failed = [one for one in ran.values() if one.command in EXAMPLES[title].commands and one.status != 0]
    assert not failed, "\n".join(f"{one.command}: {one.status}\n{one.text}" for one in failed)


@pytest.mark.parametrize("title", TRAINED)
def test_trains_resumes_generates_and_is_scored(tree, ran, title):
    name = TRAINED[title]
    assert not [verb for verb in VERBS if not output(ran, title, verb)]
    first, second = output(ran, title, "train")
    assert "step 4/4  loss" in first and "resumed" not in first
    assert f"resumed from try/{name}/checkpoints/step-00000004 (step 4 of 6)" in second and "step 6/6  loss" in second
    assert output(ran, title, "generate")[0].startswith("def ")
    scored = json.loads((tree / "try" / "results" / name / "results.json").read_text())["results"]
    assert {one["task"] for one in scored} == {"house"} and scored[0]["model"] == name
    assert len(losses(tree, name)) == 6 and all(5 < loss < 7 for loss in losses(tree, name))


def test_the_backend_is_the_one_that_trained(tree, ran):
    """The same sums as those of the run with another optimizer, by other kernels."""
    blockwise, lion = losses(tree, "blockwise"), losses(tree, "lion")
    assert blockwise[0] == pytest.approx(lion[0], abs=1e-4)
    [described] = output(ran, "An attention backend", "describe")
    assert "x = attention" in described


def test_the_family_is_exported_and_imported_to_the_same_bits(tree, ran):
    assert "`llmtrain export` writes it as ArceeForCausalLM" in output(ran, "A model family", "describe")[0]
    first, again = (load_file(tree / "try" / name / "model.safetensors") for name in ("arcee-exported", "arcee-again"))
    assert first.keys() == again.keys() and all(first[name].equal(again[name]) for name in first)
    assert "model.layers.1.mlp.up_proj.weight" in first and "model.layers.1.mlp.gate_proj.weight" not in first
    config = json.loads((tree / "try" / "arcee-exported" / "config.json").read_text())
    assert config["architectures"] == ["ArceeForCausalLM"]


def test_the_optimizer_has_one_state_and_its_share_of_memory(tree, ran):
    checkpoint = tree / "try" / "lion" / "checkpoints" / "step-00000006"
    names = indexes.read(checkpoint, manifests.read(checkpoint)).tensors
    assert {name.rpartition(".")[2] for name in names if name.startswith("optimizer.state.")} == {"exp_avg"}
    assert "optimizer (Lion)" in output(ran, "An optimizer", "describe")[0]
    section = json.loads((tree / "yamls" / "schema.json").read_text())["$defs"]
    assert "type" in section["LionConfig"]["required"] and "type" not in section["AdamWConfig"]["required"]


def test_the_gpu_has_a_peak(ran):
    assert "40% MFU (foundry) of 181.1 TFLOP/s, NVIDIA L40" in output(ran, "A GPU", "describe")[0]
    assert "NVIDIA L40 datasheet" in output(ran, "A GPU", "mfu")[0]


@pytest.mark.parametrize("command", REFUSED)
def test_refusals(ran, command):
    assert ran[command].status == 2 and REFUSED[command] in ran[command].text


SPARSE = "train try/run.yaml model.blocks.x.mlp.type=sparse schedule.type=constant train.microbatch_size=1"


def test_a_layer_logs_its_loss_and_what_it_measures(tree, ran):
    rows = [json.loads(line) for line in (tree / "try" / "sparse" / "metrics.jsonl").read_text().splitlines()]
    for row in (row for row in rows if "loss/train/total" in row):
        assert 0 < row["loss/train/sparsity"] < 0.1 and 0.3 < row["blocks.1.mlp/active"] < 0.7
    assert "sparse MLP 128" in output(ran, "A feed-forward layer", "describe")[0]


def test_a_layer_with_state_resumes_to_the_same_bits_also_with_recomputation(tree):
    """With the state that their layers change after a step."""
    commands = [
        f"{SPARSE} name=whole train.duration='6 steps'",
        f"{SPARSE} name=parts train.activation_checkpointing.type=full",
        f"{SPARSE} name=parts train.activation_checkpointing.type=full train.duration='6 steps'",
    ]
    for one in run(tree, [f"uv run llmtrain {command}" for command in commands]).values():
        assert one.status == 0, one.text
    whole, parts = (counted(tree, name) for name in ("whole", "parts"))
    assert len(whole) == 6 and whole == parts
    checkpoint = tree / "try" / "parts" / "checkpoints" / "step-00000006"
    names = indexes.read(checkpoint, manifests.read(checkpoint)).tensors
    assert "model.blocks.0.mlp.pressure" in names and "model.blocks.0.mlp.shares" not in names


def test_a_layer_with_state_on_two_ranks(tree):
    """The losses, sums and gradients of one rank."""
    settings = "train.precision=amp_bf16 train.compile=off"
    for name, ranks in (("one", 1), ("two", 2)):
        words = f"{SPARSE} {settings} name={name} --nproc {ranks}".replace("'", "").split()
        output_of(*LLMTRAIN, *words, cwd=tree, PYTHONPATH=str(tree))
    for one, two in zip(counted(tree, "one"), counted(tree, "two"), strict=True):
        assert one == pytest.approx(two, abs=2e-2)


def counted(tree: Path, name: str) -> list[dict[str, float]]:
    """Losses, gradient norms and loads by step."""
    lines = (tree / "try" / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss/train/total" in row]
    return [{key: row[key] for key in row if key.startswith(("loss/", "train/", "blocks."))} for row in rows]


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_needs_no_other(tmp_path, title):
    example = EXAMPLES[title]
    for path, _ in example.edits:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    example.apply(tmp_path)
    for path, text in example.files:
        assert (tmp_path / path).read_text() == text and not (ROOT / path).exists()


def test_the_code_is_in_the_house_style(tree):
    files = {
        path for example in EXAMPLES.values() for path, _ in (*example.files, *example.edits) if path.endswith(".py")
    }
    for arguments in (["check"], ["format", "--check"]):
        output_of(sys.executable, "-m", "ruff", *arguments, *sorted(files), cwd=tree)


def test_the_command_line_is_the_modules(tree):
    """`python -m llmtrain.cli`, in a process of its own."""
    command = (*LLMTRAIN, "check", "try/run.yaml", "optimizer.type=lion")
    assert "try/run.yaml: OK" in output_of(*command, cwd=tree, PYTHONPATH=str(tree))


@pytest.mark.slow
def test_lion_on_two_ranks_and_resumed_on_one(tree, ran):
    """Sharded, and on another number of ranks afterwards: the losses of one rank."""
    settings = ["try/run.yaml", "name=lion-2", "optimizer={type: lion, lr: 1e-4}"]
    for arguments in (["--nproc", "2"], ["train.duration=6 steps"]):
        output_of(*LLMTRAIN, "train", *settings, *arguments, cwd=tree, PYTHONPATH=str(tree))
    assert losses(tree, "lion-2") == pytest.approx(losses(tree, "lion"), abs=1e-3)


PART = """\
# A thing

File `a/new.py`:

```python
x = 1
```

In `old.py`:

```diff
 first
-second
+2nd

@@
 last
+after
```

```sh
uv run llmtrain check a.yaml
```

```
prose
```
"""


def test_a_page_is_parsed():
    assert parse(PART) == Example(
        "A thing",
        files=[("a/new.py", "x = 1\n")],
        edits=[("old.py", " first\n-second\n+2nd\n\n@@\n last\n+after\n")],
        commands=["uv run llmtrain check a.yaml"],
    )


def test_edits_are_applied_exactly(tmp_path):
    (tmp_path / "old.py").write_text("zeroth\nfirst\nsecond\n\nlast\n")
    parse(PART).apply(tmp_path)
    assert (tmp_path / "old.py").read_text() == "zeroth\nfirst\n2nd\n\nlast\nafter\n"


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("-second", "-secnd", "0 times"),
        (" last", " la", "0 times"),
        (" first\n-second", "-again", "2 times"),
        ("+after\n", "", "changes nothing"),
        ("+2nd", "2nd", "no line of a diff"),
        ("In `old.py`:", "In old.py:", "a block in diff"),
        ("```python", "```diff", "a block in diff"),
        ("File `a/new.py`:\n", "The file:\n", "a block in python"),
        ("File `a/new.py`", "File `old.py`", "exists already"),
        ("```\nprose", "```console\nprose", "a block in console"),
    ],
)
def test_a_page_that_drifts_is_refused(tmp_path, old, new, message):
    (tmp_path / "old.py").write_text("again\n\nfirst\nsecond\n\nlast\nagain\n\n")
    with pytest.raises(PageError, match=message):
        parse(PART.replace(old, new)).apply(tmp_path)
