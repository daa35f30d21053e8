"""`--model llmtrain` in lm-evaluation-harness: the answers of its own `hf` on the exported model."""

import ast
import importlib.util
import json
import os
import random
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.convert.export import export
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.models.config import ModelConfig
from tests.support import checkpoints
from tests.support.icl import byte_level, some_sentence
from tests.support.tiny import BLOCKS

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("needs lm_eval, of the development dependencies", allow_module_level=True)

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry

import llmtrain_lm_eval
from llmtrain.eval.lm_eval_model import LlmtrainLM

ROOT = Path(__file__).parents[2]
WINDOW = 96
SIZES = {"vocab_size": 640, "d_model": 32, "max_seq_len": WINDOW}
_MLP = {"type": "swiglu", "d_ff": 48}
_ATTENTION = {"type": "attention", "n_heads": 4, "n_kv_heads": 2, "position": {"type": "rotary"}, "mlp": _MLP}
LLAMA = {"blocks": {"attn": _ATTENTION}, "layers": "attn*2"}
ZAMBA = {"blocks": BLOCKS, "layers": "m (s+m)*2"}
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}<|end|>{{ message['content'] }}\n{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant<|end|>{% endif %}"""


def tokenizer() -> TextTokenizer:
    made = byte_level(bos=True)
    made.backend.add_special_tokens(["<|start|>", "<|end|>"])
    return replace(made, chat_template=TEMPLATE)


@pytest.fixture(scope="module", params={"llama": LLAMA, "zamba": ZAMBA}.items(), ids=lambda pair: pair[0])
def checkpoint(request, tmp_path_factory) -> Path:
    """A run with one checkpoint of random weights, large enough that the model prefers some tokens."""
    run = tmp_path_factory.mktemp(request.param[0])
    generator = torch.Generator().manual_seed(0)
    config = ModelConfig.model_validate_json(json.dumps(SIZES | request.param[1]))
    step = checkpoints.save(
        run / "checkpoints" / "step-00000001", config, lambda shape: 0.3 * torch.randn(shape, generator=generator)
    )
    tokenizer().save(step / "tokenizer")
    return run


@pytest.fixture(scope="module")
def ours(checkpoint) -> LlmtrainLM:
    return LlmtrainLM(run=str(checkpoint), dtype="float32")


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory) -> Path:
    export(checkpoint, out := tmp_path_factory.mktemp("exported") / "model")
    return out


@pytest.fixture(scope="module")
def theirs(exported) -> Any:
    from lm_eval.models.huggingface import HFLM

    model: Any = HFLM  # its type hides what it inherits
    return model(pretrained=str(exported), dtype="float32", device="cpu", max_length=WINDOW, batch_size=4)


def instances(kind: Any, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, one, 0, metadata=("it", at, 1)) for at, one in enumerate(arguments)]


def test_log_likelihoods(ours, theirs):
    rng = random.Random(2)
    contexts = ["", "<s>the of", "of a \n", some_sentence(rng, 90), *(some_sentence(rng, 12) for _ in range(6))]
    asked = [(context, continuation) for context in contexts for continuation in (" the", " water people.", "x\n")]
    found = ours.loglikelihood(instances("loglikelihood", asked), disable_tqdm=True)
    expected = theirs.loglikelihood(instances("loglikelihood", asked), disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=0, abs=2e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_texts_longer_than_the_window(ours, theirs):
    rng = random.Random(4)
    asked = [(some_sentence(rng, words),) for words in (1, 40, 200, 300)] + [("",)]
    found = ours.loglikelihood_rolling(instances("loglikelihood_rolling", asked), disable_tqdm=True)
    expected = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", asked), disable_tqdm=True)
    assert found == pytest.approx(expected, rel=0, abs=1e-3)


def test_greedy_answers(ours, theirs):
    rng = random.Random(5)
    options = [{"until": ["\n", "."], "max_gen_toks": 12}, {"until": " the", "do_sample": False, "temperature": 0.0}]
    asked = [(some_sentence(rng, 10) + ":", options[at % 2] | {"max_gen_toks": 8 + at % 2}) for at in range(8)]
    found = ours.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert found == theirs.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert len(set(found)) > 4


def test_chat_templates(ours, theirs):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 = ?"}]
    answer = [*turns, {"role": "assistant", "content": "It is"}]
    assert ours.apply_chat_template(turns) == theirs.apply_chat_template(turns)
    assert ours.apply_chat_template(answer, False) == theirs.apply_chat_template(answer, False)
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE
    with pytest.raises(EvalError, match=r"--apply_chat_template tool_use: .*chat_template=FILE"):
        ours.chat_template("tool_use")


def test_drawn_answers_differ_between_repeats_and_not_between_runs(ours):
    sampled = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "top_k": 50, "max_gen_toks": 12, "until": []}
    asked = instances("generate_until", [("The people", sampled)]) * 4  # as the harness repeats a request
    torch.manual_seed(1234)
    found = ours.generate_until(asked, disable_tqdm=True)
    assert len(set(found)) == 4
    assert ours.generate_until(asked, disable_tqdm=True) == found
    torch.manual_seed(5)
    assert ours.generate_until(asked, disable_tqdm=True) != found


def test_transformers_draws_the_same(ours, exported):
    """Draws depend on seed and document, not on the implementation of the model or on what is decoded together."""
    theirs = LlmtrainLM(run=str(exported), backend="transformers", dtype="float32", max_length=WINDOW)
    rng = random.Random(8)
    for options in ({"temperature": 1.2, "top_k": 40}, {"temperature": 0.9, "top_p": 0.9}, {"repetition_penalty": 1.3}):
        kwargs = options | {"max_gen_toks": 10, "until": ["."]}
        asked = instances("generate_until", [(some_sentence(rng, 3 + at % 2), kwargs) for at in range(6)])
        torch.manual_seed(3)
        found = ours.generate_until(asked, disable_tqdm=True)
        assert theirs.generate_until(asked, disable_tqdm=True) == found
        assert len(set(found)) > 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_gen_toks": 8, "do_sample": True}, "do_sample: answers cannot be drawn at temperature 0"),
        ({"max_gen_toks": WINDOW}, f"max_gen_toks is {WINDOW}; the model's window of {WINDOW} tokens"),
    ],
)
def test_generation_that_is_refused(ours, options, said):
    with pytest.raises(EvalError, match=f"task it, document 0: .*{said}"):
        ours.generate_until(instances("generate_until", [("The", options)]))


def test_a_continuation_too_long_for_the_window_is_refused_before_the_model_reads(ours):
    with pytest.raises(EvalError, match=f"task it, document 1: a continuation of .* window of {WINDOW}"):
        ours.loglikelihood(instances("loglikelihood", [("a", " the"), ("a", " the" * 200)]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "run=FOLDER"),
        ({"run": "a", "pretrained": "b"}, "run=FOLDER"),
        ({"run": "a", "parallelize": True}, "no model argument parallelize; it has run"),
        ({"run": "a", "dtype": "int8"}, "dtype=int8; expected one of auto, bfloat16"),
        ({"run": "a", "max_length": "x"}, "max_length=x; expected a whole number"),
        ({"run": "a", "device": "mps"}, "--device mps: llmtrain's models run on"),
        ({"run": "nowhere/at/all"}, "no run at nowhere/at/all|there is no checkpoint|nowhere"),
    ],
)
def test_model_arguments_that_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        LlmtrainLM.create_from_arg_obj(arguments, {"batch_size": 1, "max_batch_size": None})


def test_the_harness_finds_the_model_by_name(monkeypatch):
    monkeypatch.setattr(model_registry, "_objs", dict(model_registry._objs))
    model_registry._objs.pop("llmtrain")
    llmtrain_lm_eval.register()
    assert get_model("llmtrain") is LlmtrainLM
    assert "hf" in model_registry


def test_registration_leaves_other_programs_alone(monkeypatch):
    """torch cannot be imported where it fails, so it must not, whatever is installed beside it."""
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)  # as of a broken or another harness
    llmtrain_lm_eval.register()
    monkeypatch.delitem(sys.modules, "lm_eval")
    llmtrain_lm_eval.register()
    assert "lm_eval" not in sys.modules
    text = Path(llmtrain_lm_eval.__file__).read_text()
    tree = [one for one in ast.parse(text).body if isinstance(one, ast.Import | ast.ImportFrom)]
    imported = {one.module if isinstance(one, ast.ImportFrom) else one.names[0].name for one in tree}
    assert imported <= {"contextlib", "importlib", "sys"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the entry points of pyproject.toml, as an installation of llmtrain has them."""
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "llmtrain-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: llmtrain\nVersion: 0\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n{name} = {value}\n" for group, names in groups.items() for name, value in names.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    return folder


def task(folder: Path) -> Path:
    """A folder of one task of the harness, with data and few-shot examples."""
    rng = random.Random(6)
    records = [
        {"query": some_sentence(rng, 8), "choices": [some_sentence(rng, 3) for _ in range(3)], "gold": rng.randrange(3)}
        for _ in range(9)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    settings = {
        "task": "house",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}?",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "house.yaml").write_text(json.dumps(settings))
    return folder / "house.yaml"


def command(installed: Path, folder: Path, *arguments: object, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    """The harness's results of its own command."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": f"{installed}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    program = [sys.executable, *launcher, "-m", "lm_eval"] if launcher else [Path(sys.executable).parent / "lm_eval"]
    line = [*map(str, [*program, *arguments])]
    line += ["--output_path", str(folder / "out.json"), "--device", "cpu"]
    done = subprocess.run(line, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = folder.glob("out*.json")
    return json.loads(file.read_text())


def test_the_harness_default_device_is_the_cpu_where_there_is_no_gpu(exported, monkeypatch):
    """The harness gives its default, cuda:0, as if the user had; an argument of the model goes before its option."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = f"pretrained={exported},dtype=float32"
    for arguments, options in ((text, {"device": "cuda:0"}), (f"{text},device=cpu", {"device": "cuda"}), (text, {})):
        made = LlmtrainLM.create_from_arg_string(arguments, {**options, "batch_size": 1})
        assert made._device.type == "cpu"
    with pytest.raises(EvalError, match="--device cuda: there are 0 GPUs here"):
        LlmtrainLM.create_from_arg_obj({"pretrained": str(exported)}, {"device": "cuda"})


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [("zamba", ZAMBA)], indirect=True, ids=["zamba"])
def test_the_harness_own_command(checkpoint, exported, installed, tmp_path):
    file = task(tmp_path)
    rest = ("--tasks", file, "--num_fewshot", 2, "--apply_chat_template", "--log_samples")
    found = {}
    for name, arguments, launcher in (
        ("hf", f"pretrained={exported},dtype=float32", ()),
        ("llmtrain", f"run={checkpoint},dtype=float32", ()),
        ("two ranks", f"run={checkpoint},dtype=float32", ("-m", "torch.distributed.run", "--nproc-per-node", "2")),
    ):
        (folder := tmp_path / name).mkdir()
        model = "hf" if name == "hf" else "llmtrain"
        found[name] = command(installed, folder, "--model", model, "--model_args", arguments, *rest, launcher=launcher)
    for name in ("llmtrain", "two ranks"):
        assert found[name]["results"] == found["hf"]["results"], name
        assert found[name]["chat_template"] == TEMPLATE
        assert found[name]["config"]["model"] == "llmtrain"
