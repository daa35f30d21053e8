"""Speed of evaluation beside lm-evaluation-harness's `hf` model, on the same weights, in the same process.

    python -m llmtrain.bench.evaluation FILE [a.b=c …] --data-dir DIR [--limit N] [--tasks arc_easy arc_challenge:5 …]

FILE: a run's YAML, for the model's shape. Its weights are random, bf16 on a GPU, and written in Hugging Face format to a
temporary folder, from which both sides load them; the tokenizer is trained on the tasks' own text. Both are given the
documents and timed from prompts as text to log-likelihoods. The harness runs with each batch size of --peer-batch, and
its best counts. Without the harness (lm_eval), or with --no-peer, only our side is measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llmtrain.bench.eval_peer import ask, instances, load_peer
from llmtrain.config.load import load_config
from llmtrain.data.tokenizer import TextTokenizer, train_bpe
from llmtrain.eval.documents import Choices, Schema
from llmtrain.eval.models import find_model, find_tokenizer, load_scorer
from llmtrain.eval.request import Score
from llmtrain.eval.scorer import HybridScorer
from llmtrain.eval.task import Documents, Task, document_text, load_task
from llmtrain.eval.together import by_document
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import family_for
from llmtrain.models.hybrid import HybridLM

TASKS = ("arc_challenge", "arc_easy", "boolq", "piqa", "winograd", "winogrande", "arc_challenge:5")
"""The seed table's that are at hand, with their numbers of examples if not 0."""
_WARM_UP = 32
"""Documents answered before the clock starts: kernels are compiled, and libraries set up."""


@dataclass
class Measured:
    """One task on both sides. Rates in documents/s. tokens: read by us; naive: by one forward pass per request.

    difference: largest between log-likelihoods. agreement: share of documents with the same best alternative.
    """

    task: str
    documents: int
    ours: float
    theirs: float | None
    batch: int | None
    tokens: int
    slots: int
    naive: int
    calls: int
    difference: float | None
    agreement: float | None

    def __str__(self) -> str:
        line = (
            f"{self.task:16} {self.documents:6} documents  llmtrain {self.ours:9.1f}/s, "
            f"{self.naive / self.tokens:4.1f} x fewer tokens, {self.slots / self.tokens:.2f} x padding, {self.calls} calls"
        )
        if self.theirs is None:
            return line
        return (
            f"{line}  lm-evaluation-harness {self.theirs:9.1f}/s (batch {self.batch})  {self.ours / self.theirs:5.2f} x  "
            f"max |difference| {self.difference:.3f}, same choice {100 * (self.agreement or 0):.1f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK[:SHOTS]")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--peer-batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--peer-limit", type=int, help="documents for the harness, which takes long; default: as ours")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--vocab", type=int, default=16_000, help="of the tokenizer")
    parser.add_argument("--out", metavar="JSON")
    args = parser.parse_intermixed_args()
    config = load_config(args.file, args.overrides)
    chosen = [(load_task(name, "lm-eval", args.data_dir), int(shots or 0)) for name, shots in map(_parse, args.tasks)]
    documents = {task.name: task.documents(args.limit) for task, _ in chosen}
    with tempfile.TemporaryDirectory() as folder:
        export_random(config.model, _tokenizer(documents.values(), args.vocab), Path(folder))
        found = find_model(folder)
        tokenizer = find_tokenizer(found)
        scorer = load_scorer(
            found, tokenizer, max_length=config.model.max_seq_len, max_batch_tokens=args.max_batch_tokens
        )
        assert isinstance(scorer, HybridScorer)
        device = scorer.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        count = sum(parameter.numel() for parameter in scorer.model.parameters())
        print(f"{config.name}, {count:,} parameters, {scorer.model.embed.weight.dtype}, {name}", flush=True)
        ours = [_ours(task, documents[task.name], shots, scorer, tokenizer) for task, shots in chosen]
        if args.no_peer or (peer := _peer(folder, config.model.max_seq_len)) is None:
            rows = [measured for measured, _ in ours]
            print(*rows, sep="\n", flush=True)
        else:
            del scorer
            rows = []
            for (measured, answers), (task, shots) in zip(ours, chosen, strict=True):
                _theirs(measured, answers, peer, task, documents[task.name], shots, args.peer_batch, args.peer_limit)
                rows.append(measured)
                print(measured, flush=True)
    if args.out:
        content = {"model": config.name, "device": name, "rows": [asdict(row) for row in rows]}
        Path(args.out).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _parse(task: str) -> tuple[str, str]:
    name, _, shots = task.partition(":")
    return name, shots


def _tokenizer(documents: Any, vocab: int) -> TextTokenizer:
    """Trained on the documents, so that their tokens are as long as a real tokenizer's."""
    return train_bpe([document_text(one) for some in documents for one in some.everything], vocab)


def export_random(config: ModelConfig, tokenizer: TextTokenizer, folder: Path) -> None:
    """A folder in Hugging Face format; weights as at the start of training."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = HybridLM(config, dtype=torch.float32)
    model.to_empty(device=device)
    model.init_weights(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    family = family_for(config)
    parameters = dict(model.named_parameters())
    tensors: dict[str, torch.Tensor] = {}
    for weight in family.weights(config):
        split = weight.split(parameters[weight.ours].detach())
        tensors |= {name: tensor.to(dtype).cpu().contiguous() for name, tensor in split.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eod_id, "pad_token_id": None}
    content = family.write_config(config) | {"dtype": str(dtype).removeprefix("torch.")} | ids
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer.save(folder)


def _ours(
    task: Task, documents: Documents, shots: int, scorer: HybridScorer, tokenizer: TextTokenizer
) -> tuple[Measured, list[float]]:
    def ask() -> tuple[list[Score], list[float]]:
        requests = [one for one in task.requests(documents, tokenizer, shots, pmi=False) if isinstance(one, Score)]
        return requests, [one.log_likelihood for one in scorer.score(requests, window=task.window(scorer.window) - 1)]

    few = [one for one in task.requests(documents, tokenizer, shots, pmi=False) if isinstance(one, Score)]
    scorer.score([few[index] for group in list(by_document(few).values())[:_WARM_UP] for index in group])
    began = _clock()
    requests, answers = ask()
    seconds = _clock() - began
    naive = sum(min(len(one.context) + len(one.continuation) - 1, scorer.window) for one in requests)
    plan = scorer.plan
    title = f"{task.name}:{shots}" if shots else task.name
    rate = len(documents) / seconds
    measured = Measured(
        *(title, len(documents), rate, None, None), plan.tokens, plan.slots, naive, plan.calls, None, None
    )
    return measured, answers


def _peer(folder: str, max_length: int) -> Any:
    try:
        return load_peer(folder, max_length, "bfloat16" if torch.cuda.is_available() else "float32")
    except ImportError as error:
        print(f"lm-evaluation-harness is not here ({error}); measuring llmtrain alone")
        return None


def _theirs(
    measured: Measured,
    ours: Sequence[float],
    peer: Any,
    task: Task,
    documents: Documents,
    shots: int,
    batches: Sequence[int],
    limit: int | None,
) -> None:
    """Fills in what concerns the harness."""
    some, asked = instances(task, documents, shots, limit)
    few = {one.index for one in some[:_WARM_UP]}
    best = None
    for batch in batches:
        peer.batch_size_per_gpu = batch
        ask(peer, [one for one in asked if one[0] in few])
        began = _clock()
        found = [answer[0] for answer in ask(peer, asked)]
        rate = len(some) / (_clock() - began)
        if best is None or rate > best:
            best, measured.theirs, measured.batch = rate, rate, batch
            measured.difference = max(abs(a - b) for a, b in zip(ours, found, strict=False))
    measured.agreement = _agreement(documents, some, ours, found)


def _agreement(documents: Documents, some: Sequence[Any], ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Share of documents whose likeliest alternative is the same."""
    at = same = 0
    for document in some:
        content = document.content
        count = len(content.choices) if isinstance(content, Choices) else 1
        count = len(content.contexts) if isinstance(content, Schema) else count
        mine, other = ours[at : at + count], theirs[at : at + count]
        same += mine.index(max(mine)) == other.index(max(other))
        at += count
    return same / len(some)


def _clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
