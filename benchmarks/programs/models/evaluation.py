"""Speed of evaluation beside lm-evaluation-harness's `hf` model, on the same weights, in the same process.

    python -m benchmarks evaluation FILE [a.b=c …] --data-dir DIR [--limit N] [--tasks arc_easy arc_challenge:5 …]

FILE: a run's YAML, for the model's shape. Its weights are random, bf16 on a GPU, and written in Hugging Face format to a
temporary folder, from which both sides load them; the tokenizer is trained on the tasks' own text. Both are timed from
prompts as text to log-likelihoods. llmtrain is timed in --passes over all tasks, after one pass that compiles kernels (once for a
machine), each task from the end of the one before to its own, because a task's prompts are tokenised while those before are scored,
as in `llmtrain eval`; the median of the passes counts. The harness runs with each batch size of --peer-batch, and its fastest
counts. It may be too slow to answer everything: --peer-limit and --peer-seconds stop it early, and its rate is then that of the
documents it did answer, spread evenly over the task. Its transformers runs scans by mamba_ssm and causal_conv1d where they are
installed, and else in PyTorch, many times slower: the packages found are printed. Without the harness (lm_eval), or with --no-peer,
only llmtrain is measured. --out is rewritten after every task of the harness.
"""

import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.eval_peer import PeerMeasured, instances, load_peer, measure_peer
from benchmarks.harness.models import clock, export_random
from benchmarks.harness.plan_work import work
from benchmarks.harness.report import Report, Row, device_name
from llmtrain.bench.machine import OPTIONAL
from llmtrain.data.tokenize.tokenizer import TextTokenizer, train_bpe
from llmtrain.errors import UserError
from llmtrain.eval.native_task import NativeTask, load_task
from llmtrain.eval.prompts.requests import LoglikelihoodRequest
from llmtrain.eval.runner import frozen_gc
from llmtrain.eval.scoring.load import find_model, find_tokenizer, load_scorer
from llmtrain.eval.scoring.overlap import Prefetcher, Steps, no_host_work, run_steps
from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.eval.task import Documents
from llmtrain.schema.load import load_config

TASKS = ("arc_challenge", "arc_easy", "boolq", "piqa", "winograd", "winogrande", "arc_challenge:5")
"""Tasks of the seed gauntlet with data at hand, and their numbers of examples if not 0."""

_VOCAB = 16_000


@dataclass
class Measured:
    """Measurements of one task. passes: documents/s of llmtrain. tokens: read by it; naive: by one forward pass per request."""

    task: str
    documents: int
    passes: list[float]
    tokens: int
    slots: int
    naive: int
    calls: int
    theirs: PeerMeasured | None = None

    @property
    def ours(self) -> float:
        return statistics.median(self.passes)

    def figures(self) -> Row:
        """Row of the task: the harness's figures too, once there are any."""
        row: Row = {"documents_count": self.documents, "calls_count": self.calls, "ours_documents_per_s": self.ours}
        row |= {"ours_least_documents_per_s": min(self.passes), "ours_most_documents_per_s": max(self.passes)}
        row |= {"fewer_tokens_x": self.naive / self.tokens, "padding_x": self.slots / self.tokens}
        if (theirs := self.theirs) is not None:
            row |= {"harness_documents_per_s": theirs.rate, "harness_x": self.ours / theirs.rate}
            row |= {"harness_documents_count": theirs.documents, "harness_batch_count": theirs.batch}
            row |= {"difference_nats": theirs.difference, "same_choice_percent": 100 * theirs.agreement}
        return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__name__, __doc__, config=True, out=True)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK[:SHOTS]")
    parser.add_argument("--limit", type=positive)
    parser.add_argument("--max-batch-tokens", type=positive)
    parser.add_argument("--passes", type=positive, default=5, help="of ours over all tasks")
    parser.add_argument("--peer-batch", type=positive, nargs="+", default=[32, 128])
    parser.add_argument("--peer-limit", type=positive, help="documents for the harness, if fewer than for ours")
    parser.add_argument("--peer-limit-shots", type=positive, help="the same, for tasks with examples")
    parser.add_argument("--peer-seconds", type=number, help="for the harness on each task, all batch sizes together")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--vocab", type=positive, help=f"default: {_VOCAB:,}, or what the tasks' text yields")
    args = parser.parse(argv)
    config = load_config(args.file, args.overrides)
    if args.out and args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder; name a file, such as {args.out / 'evaluation.json'}")
    report = Report(args.out)
    named = [task.partition(":") for task in args.tasks]
    chosen = [(load_task(name, "lm-eval", args.data_dir), int(shots or 0)) for name, _, shots in named]
    documents = {task.name: task.documents(args.limit) for task, _ in chosen}
    with frozen_gc(), tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        export_random(config.model, Path(folder), dtype, _tokenizer(documents.values(), args.vocab))
        found = find_model(folder)
        tokenizer = find_tokenizer(found)
        sizes: dict[str, Any] = {"max_length": config.model.max_seq_len, "max_batch_tokens": args.max_batch_tokens}
        scorer = load_scorer(found, tokenizer, **sizes)
        assert isinstance(scorer, HybridScorer)
        count, dtype = sum(p.numel() for p in scorer.model.parameters()), scorer.model.hybrid.embed.weight.dtype
        print(f"{config.name}, {count:,} parameters, {dtype}, {device_name()}", flush=True)
        packages = [one for one in OPTIONAL if importlib.util.find_spec(one)]
        print(f"optional packages that the harness may use: {', '.join(packages) or 'none'}", flush=True)

        rows, answers = [], []
        for task, shots in chosen:  # Triton's kernels are compiled for the sizes that come
            requests = run_steps(_requests(task, documents[task.name], shots, tokenizer))
            answers.append(_score(scorer, task, requests, no_host_work))
            title = f"{task.name}:{shots}" if shots else task.name
            rows.append(_counted(title, documents[task.name], requests, scorer))
        for _ in range(args.passes):
            began = clock()
            prefetcher = Prefetcher(chosen, lambda one: _requests(one[0], documents[one[0].name], one[1], tokenizer))
            for row, ((task, _), requests) in zip(rows, prefetcher, strict=True):
                _score(scorer, task, requests, prefetcher.step)
                ended = clock()
                row.passes.append(row.documents / (ended - began))
                began = ended
        for row in rows:
            report.add(row.task, **row.figures())
        del scorer
        if args.no_peer or (peer := _peer(folder, config.model.max_seq_len)) is None:
            return
        for row, scores, (task, shots) in zip(rows, answers, chosen, strict=True):
            print(f"{row.task}: asking lm-evaluation-harness", flush=True)
            limit = args.peer_limit_shots if shots and args.peer_limit_shots else args.peer_limit
            asked = instances(task, documents[task.name], shots)
            bounds: dict[str, Any] = {"limit": limit, "seconds": args.peer_seconds}
            row.theirs = measure_peer(peer, asked, scores, args.peer_batch, **bounds)
            report.add(row.task, **row.figures())


def _tokenizer(documents: Iterable[Documents], vocab: int | None) -> TextTokenizer:
    """Tokenizer trained on the documents, so that their tokens are as long as a real tokenizer's."""
    texts = [one.text for some in documents for one in some.everything]
    made = train_bpe(texts, _VOCAB if vocab is None else vocab, or_fewer=vocab is None)
    if vocab is None and made.vocab_size < _VOCAB:
        print(f"a tokenizer of {made.vocab_size:,} tokens: the tasks' text yields no more")
    return made


def _requests(
    task: NativeTask, documents: Documents, shots: int, tokenizer: TextTokenizer
) -> Steps[list[LoglikelihoodRequest]]:
    made = yield from task.request_steps(documents, tokenizer, shots, pmi=False)
    return [one for one in made if isinstance(one, LoglikelihoodRequest)]


def _score(
    scorer: HybridScorer, task: NativeTask, requests: list[LoglikelihoodRequest], host_work: Callable[[], bool]
) -> list[float]:
    found = scorer.loglikelihood(requests, window=task.window(scorer.window) - 1, host_work=host_work)
    return [one.log_likelihood for one in found]


def _counted(title: str, documents: Documents, requests: list[LoglikelihoodRequest], scorer: HybridScorer) -> Measured:
    naive = sum(min(len(one.context) + len(one.continuation) - 1, scorer.window) for one in requests)
    done = work(scorer.plan)
    return Measured(title, len(documents), [], done.tokens, done.slots, naive, done.calls)


def _peer(folder: str, max_length: int) -> Any:
    try:
        return load_peer(folder, max_length, "bfloat16" if torch.cuda.is_available() else "float32")
    except ImportError as error:
        print(f"lm-evaluation-harness is not here ({error}); measuring llmtrain alone")
        return None
