"""Evaluation by several ranks: results of one rank, every document once, no deadlock."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.distributed.world import initialize, world_from_environment
from llmtrain.eval import runner
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prepare import prepare_steps, read_documents
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest, Response, responses_in_order
from llmtrain.eval.run_config import EvalRun
from llmtrain.eval.runner import evaluate
from llmtrain.eval.scoring.data_parallel import DataParallel, partition, run_requests
from llmtrain.eval.scoring.scorer import HybridScorer
from llmtrain.generate.load import load_model
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.training import Sharding, TrainConfig
from llmtrain.train.callbacks.evaluation import join_uneven_calls
from llmtrain.train.composer_model import evaluating
from llmtrain.train.parallel import parallelize
from tests.support import checkpoints
from tests.support.evaluation import Place
from tests.support.ranks import RankFailed
from tests.support.scoring import Text, assert_same_scores, choices, letters, schemas, texts


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("eval"))


def details(run: EvalRun) -> tuple[dict[tuple[str, int], list[dict[str, Any]]], list[int]]:
    """A job: every document's details by task, and how many documents were asked about."""
    report = evaluate(run)
    found = {
        (one.task, one.shots): [dict(per_document.details) for per_document in one.metrics.per_document]
        for one in report.results
    }
    return found, [one.asked for one in report.results]


def assert_same_details(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for task, documents in expected.items():
        assert [one["document"] for one in found[task]] == [one["document"] for one in documents]
        for mine, theirs in zip(found[task], documents, strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                same = pytest.approx(value, abs=1e-5, rel=1e-5) if name == "log_likelihoods" else value
                assert mine[name] == same, (task, name)


def test_results_do_not_depend_on_ranks_batches_or_sharing(place, ranks, tmp_path):
    expected, asked = details(place.run(cache=None))
    assert asked == [12, 12, 12, 12, 2, 12]
    for i, changes in enumerate(({"max_batch_tokens": 40}, {"share_prefixes": False})):
        assert_same_details(details(place.run(cache=str(tmp_path / str(i)), **changes))[0], expected)
    cache = str(tmp_path / "ranks")  # of one and two ranks: test_a_sharded_model_with_unequal_work
    for found, asked in ranks(3).run(details, place.run(cache=cache)):
        assert_same_details(found, expected)
        assert asked == [12, 12, 12, 12, 2, 12]
    assert all(asked == [0] * 6 for _, asked in ranks(3).run(details, place.run(cache=cache)))


def with_failures_of_one_rank(run: EvalRun) -> tuple[list[str], list[tuple[str, str]]]:
    """A job: rank 1 alone cannot read one task, prepares no requests of another, and reads other documents of a third."""
    if world_from_environment().rank == 1:

        def read(task: Any, settings: EvalRun) -> Any:
            if task.name == "cloze":
                raise EvalError("no file on this node")
            return read_documents(task, settings if task.name != "answer" else settings.model_copy(update={"limit": 2}))

        def prepare(task_run: Any, *given: Any) -> Any:
            if task_run.task.name == "schema":
                raise EvalError("no requests on this node")
            return (yield from prepare_steps(task_run, *given))

        runner.read_documents, runner.prepare_steps = read, prepare
    try:
        report = evaluate(run)
    finally:
        runner.read_documents, runner.prepare_steps = read_documents, prepare_steps
    return [one.title for one in report.results], [(one.title, one.reason) for one in report.failures]


def test_a_task_that_fails_on_one_rank_fails_on_all_and_the_others_go_on(place, ranks):
    for results, failures in ranks(2).run(with_failures_of_one_rank, place.run(cache=None)):
        assert results == ["choice (0-shot)", "choice (2-shot)", "text (0-shot)"]
        assert failures == [
            ("cloze (0-shot)", "no file on this node"),
            ("schema (0-shot)", "no requests on this node"),
            ("answer (0-shot)", "task answer: ranks read different documents; give all of them the same data"),
        ]


UNEQUAL = [*choices(7), *letters(5, shots=20), *schemas(3), *texts(6)]
REQUESTS = [LoglikelihoodRequest(i, 0, one.context, one.continuation) for i, one in enumerate(UNEQUAL[1:])]


def prompts() -> list[GenerateUntilRequest]:
    text = Text(9)
    return [GenerateUntilRequest(i, text(3, 12), (), 3 + 2 * i) for i in range(5)]


def sharded(settings: dict[str, Any], strategy: str) -> CausalLM:
    from llmtrain.models.config import ModelConfig

    device = initialize()
    with torch.device("meta"):
        model = CausalLM(HybridLM(ModelConfig.model_validate(settings), dtype=torch.float32))
    config = TrainConfig.model_validate_json('{"duration": "1 steps", "global_batch_size": 6, "microbatch_size": 1}')
    config = config.model_copy(update={"sharding": Sharding(strategy=strategy), "compile": "off"})  # type: ignore[arg-type]
    parallelize(model, config, world_from_environment(), device)
    model.hybrid.init_weights(3)
    return model.train()


def measure(settings: dict[str, Any], strategy: str, given: list[Any], fail_on: int | None = None) -> list[Response]:
    """A job: answers of a sharded model, twice, because the first leaves it as it was."""
    model = sharded(settings, strategy)
    ranks = DataParallel(world_from_environment(), lambda: join_uneven_calls(model))
    found: list[list[Response]] = []
    for _ in range(2):
        with evaluating(model):
            scorer = HybridScorer(model, checkpoints.tokenizer(), max_batch_tokens=200)
            if fail_on == ranks.world.rank:
                scorer.loglikelihood = scorer.generate_until = broken
            options: dict[str, Any] = {"save": lambda new: None, "progress": lambda count: None}
            answers = run_requests(given, scorer, ranks, title="texts (0-shot)", window=10**6, known={}, **options)
            found.append(responses_in_order(given, answers))
        assert model.training
        assert all(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    assert found[0] == found[1]
    return found[0]


def broken(*args: Any, **options: Any) -> Any:
    raise ArithmeticError("broken on purpose")


def alone(settings: dict[str, Any], given: list[Any]) -> list[Any]:
    from llmtrain.models.config import ModelConfig

    model = CausalLM(HybridLM(ModelConfig.model_validate(settings), dtype=torch.float32))
    model.hybrid.init_weights(3)
    scorer = HybridScorer(model.eval(), checkpoints.tokenizer())
    return list(
        scorer.generate_until(given) if isinstance(given[0], GenerateUntilRequest) else scorer.loglikelihood(given)
    )


@pytest.fixture(scope="module")
def settings(place) -> dict[str, Any]:
    model, _ = load_model(str(place.model))
    return model.config.model_dump()


@pytest.mark.parametrize(("size", "strategy"), [(1, "full"), (2, "full"), (2, "grad_op"), (3, "full")])
def test_a_sharded_model_with_unequal_work(ranks, settings, size, strategy):
    shares = partition({i: len(one.context) for i, one in enumerate(REQUESTS)}, range(len(REQUESTS)), size)
    assert size == 1 or len({len(share) for share in shares}) > 1
    expected = alone(settings, REQUESTS)
    for found in ranks(size).run(measure, settings, strategy, REQUESTS):
        assert_same_scores(found, expected)


def test_ranks_without_any_work_go_along(ranks, settings):
    for found in ranks(3).run(measure, settings, "full", REQUESTS[:1]):
        assert_same_scores(found, alone(settings, REQUESTS[:1]))


def test_a_sharded_model_decodes_answers_of_unequal_length(ranks, settings):
    expected = alone(settings, prompts())
    assert len({len(one.text) for one in expected}) > 1
    for found in ranks(2).run(measure, settings, "full", prompts()):
        assert found == expected


def test_a_rank_that_fails_does_not_leave_the_others_waiting(ranks, settings):
    with pytest.raises(RankFailed, match="broken on purpose"):
        ranks(2).run(collect, settings, timeout=300)
    assert len(ranks(2).run(world_size)) == 2


def collect(settings: dict[str, Any]) -> None:
    """A job: rank 1 raises while scoring; rank 0 finishes its own work."""
    model = sharded(settings, "full")
    rank = world_from_environment().rank
    with evaluating(model):
        scorer = HybridScorer(model, checkpoints.tokenizer(), max_batch_tokens=200)
        with join_uneven_calls(model):
            assert rank == 0 or broken()
            scorer.loglikelihood(REQUESTS)


def world_size() -> int:
    return world_from_environment().size


def test_a_nan_is_no_score(place, tmp_path):
    folder = tmp_path / "broken"
    from llmtrain.models.config import ModelConfig

    config = ModelConfig.model_validate(load_model(str(place.model))[0].config.model_dump())
    checkpoints.save(folder, config, lambda shape: torch.full(shape, torch.nan))
    tokenizer = next(Path(place.model).rglob("tokenizer.json")).parent
    run = place.run(models=[{"path": str(folder), "tokenizer": str(tokenizer)}], tasks=place.tasks[:1], cache=None)
    with pytest.raises(
        ValueError, match=r"choice \(0-shot\), document 0 \(from 0\): the model's log-likelihood is not a number"
    ):
        evaluate(run)
