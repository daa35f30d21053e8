"""How every bench ends: the user's mistakes in plain words, faults with their traceback."""

import json
from pathlib import Path

import pytest

import llmtrain
from llmtrain.bench.entry import status_of
from llmtrain.schema.load import load_config


def test_what_is_wrong_with_a_config_is_its_report_alone(capsys):
    assert status_of(lambda: load_config("nowhere.yaml", []) and None) == 2
    err = capsys.readouterr().err
    assert "nowhere.yaml" in err and "Traceback" not in err


def test_a_library_s_value_error_is_a_fault(capsys):
    assert status_of(lambda: json.loads("{")) == 1
    assert "JSONDecodeError" in capsys.readouterr().err


@pytest.mark.parametrize("answer, status", [(None, 0), (0, 0), (1, 1)])
def test_otherwise_main_says_the_status(answer, status):
    assert status_of(lambda: answer) == status


def test_every_bench_ends_so():
    root = Path(llmtrain.__file__).parents[1]
    files = [*root.glob("benchmarks/*.py"), root / "scripts/gpu/moving_checkpoint.py"]
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    programs = {name: text for name, text in texts.items() if 'if __name__ == "__main__":' in text}
    assert len(programs) > 5
    assert [name for name, text in programs.items() if not text.endswith(":\n    end_with(main)\n")] == []
