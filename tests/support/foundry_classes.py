"""LLM Foundry's own data sets and metrics, from a checkout of it: what tests/numerics/test_eval_foundry_classes.py compares with.

The package itself does not install beside ours; its two modules for evaluation need little of it, which is stubbed here.
"""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

COMMIT = "8c8dd48f7"
"""Of github.com/mosaicml/llm-foundry (0.22.0.dev0): the commit that the goldens were made with."""


class FoundryClasses:
    """The generation data set and its metric. root: a checkout of LLM Foundry."""

    def __init__(self, root: Path):
        stubs: dict[str, Any] = {
            "llmfoundry": {"registry": types.SimpleNamespace()},
            **{name: {} for name in ("llmfoundry.utils", "llmfoundry.eval", "llmfoundry.eval.datasets")},
            "llmfoundry.utils.registry_utils": {"construct_from_registry": None},
        }
        for name, content in stubs.items():
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(content)
        self._load(root, "llmfoundry.eval.datasets.utils")
        datasets = self._load(root, "llmfoundry.eval.datasets.in_context_learning_evaluation")
        self._generation: Any = datasets.InContextLearningGenerationTaskWithAnswersDataset
        self._metric: Any = self._load(
            root, "llmfoundry.eval.metrics.nlp"
        ).InContextLearningGenerationExactMatchAccuracy

    def _load(self, root: Path, name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, (root / name.replace(".", "/")).with_suffix(".py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def generation(self, file: Path, tokenizer: Any, shots: int, **settings: Any) -> Any:
        """Data set of a JSONL file."""
        copy = file.with_suffix(f".{shots}.copy.jsonl")
        return self._generation(
            dataset_uri=str(file),
            tokenizer=tokenizer,
            max_seq_len=100_000,
            pad_tok_id=tokenizer.eos_token_id,
            num_fewshot=shots,
            destination_path=str(copy),
            **settings,
        )

    def prompts(self, dataset: Any) -> list[list[int]]:
        """Token ids of all contexts, without the padding on the left."""
        found = []
        for index in range(len(dataset)):
            ids = list(dataset[index][dataset.context_key])
            begin = next(place for place, token in enumerate(ids) if token != dataset.pad_tok_id)
            found.append(ids[begin:])
        return found

    def right(self, dataset: Any, texts: list[str]) -> list[int]:
        """Verdict on every generated text."""
        labels = [dataset[index]["aliases"] for index in range(len(dataset))]
        return self._metric().update(dataset.base_batch, texts, labels)["result"]
