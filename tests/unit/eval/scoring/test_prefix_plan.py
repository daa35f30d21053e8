"""Tokens read by plans for requests that share prefixes."""

import itertools
import random

import pytest

from benchmarks.harness.plan_work import work
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import LoglikelihoodRequest
from llmtrain.eval.scoring.batching import Limits, Row, batch_sorted, make_rows
from llmtrain.eval.scoring.prefix_plan import Plan, best_runs, make_plan
from tests.support.scoring import KINDS, Text, choices, letters, schemas, texts

LIMITS = Limits(tokens=4096, call_cost=16)


def plan(
    requests: list[LoglikelihoodRequest], limits: Limits = LIMITS, window: int = 10**6, share: bool = True
) -> Plan:
    return make_plan(make_rows(requests, window), limits, window=window, share=share)


def naive(requests: list[LoglikelihoodRequest]) -> int:
    """Tokens that one forward pass per request reads."""
    return sum(len(request.context) + len(request.continuation) - 1 for request in requests)


def reads(made: Plan) -> dict[int, list[int]]:
    """Every row's tokens as the calls read them."""
    found: dict[int, list[int]] = {}
    for subtree in made.subtrees:
        for batch in subtree.batches:
            prefixes = batch.prefixes or [()]
            for row, parent in batch.next_tokens:
                found[row] = [*subtree.root, *prefixes[parent]]
            for suffix in itertools.chain(*batch.suffix_batches):
                assert suffix.row not in found, "read twice"
                found[suffix.row] = [*subtree.root, *prefixes[suffix.parent], *suffix.tokens]
                assert len(suffix.tokens) >= made.rows[suffix.row].scored
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [LIMITS, Limits(40, 0), Limits(10**6, 10**6), Limits(200, 3, 10, 1, 300)])
def test_every_row_is_read_once_and_in_order(kind, limits):
    made = plan(KINDS[kind](), limits)
    found = reads(made)
    assert {row: tuple(tokens) for row, tokens in found.items()} == {
        i: row.tokens[:-1] for i, row in enumerate(made.rows)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_cache_end_together(kind):
    for subtree in plan(KINDS[kind]()).subtrees:
        for batch in subtree.batches:
            if subtree.root:
                assert len({len(prefix) for prefix in batch.prefixes}) <= 1


def test_a_question_is_read_once_for_all_its_choices():
    text = Text(0)
    contexts = [text(50) for _ in range(40)]
    requests = [LoglikelihoodRequest(i, j, context, text(6)) for i, context in enumerate(contexts) for j in range(4)]
    # 49 tokens once; then the question's last, which decides the first score, and five of the choice, four times.
    assert work(plan(requests)).tokens == 40 * (49 + 4 * 6)
    assert naive(requests) == 40 * 4 * 55


def test_choices_of_one_token_need_the_question_only():
    requests = letters(20)
    made = plan(requests)
    assert work(made).tokens == sum(len(request.context) for request in requests) / 4
    assert work(made).calls < 8


def test_choices_of_one_token_beside_longer_ones_share_the_question():
    question = Text(0)(60)
    requests = [
        LoglikelihoodRequest(0, i, question, choice) for i, choice in enumerate([(1,), (2,), (3, 4), (3, 5), (6, 7, 8)])
    ]
    # The last token of the question, which decides the first score, is read with every choice.
    assert work(plan(requests, Limits(4096, 0))).tokens == 59 + 1 + 1 + 2 + 2 + 3


def test_a_few_shot_prefix_of_many_documents_is_read_once():
    text = Text(0)
    examples = text(200)
    requests = [LoglikelihoodRequest(i, 0, (*examples, *text(10)), text(5)) for i in range(50)]
    made = plan(requests)
    assert work(made).tokens == 200 + 50 * 14
    few_shot = choices(50, shots=200)
    assert work(plan(few_shot)).tokens < naive(few_shot) / 12


def test_prefixes_of_several_groups_of_documents_are_distinguished():
    """Requests like those of MMLU, whose subjects have their own examples after a common sentence."""
    text = Text(0)
    sentence = text(20)
    requests, lengths = [], 0
    for subject in range(5):
        examples = (*sentence, subject, *text(100))
        for i in range(30):
            question = text(10)
            lengths += 10
            requests.append(LoglikelihoodRequest(30 * subject + i, 0, (*examples, *question), text(1)))
    made = plan(requests)
    assert len([subtree for subtree in made.subtrees if subtree.root]) == 5
    assert work(made).tokens == 5 * 121 + lengths


@pytest.mark.parametrize(
    ("requests", "least"),
    [
        (choices(200), 1.6),
        (letters(200), 4.0),
        (schemas(200), 1.15),
        (texts(200), 1.0),
        (choices(200, shots=300), 12.0),
    ],
    ids=["choices", "letters", "schemas", "texts", "few-shot choices"],
)
def test_tokens_saved(requests, least, record_property):
    made = plan(requests, Limits(4096, 128))
    saved, padding = naive(requests) / work(made).tokens, work(made).slots / work(made).tokens
    record_property(
        "tokens",
        f"{naive(requests)} -> {work(made).tokens}, padding included {work(made).slots}, {work(made).calls} calls",
    )
    assert saved >= least
    assert padding < 1.25


def test_little_is_lost_to_padding_and_no_read_is_too_large():
    requests = texts(500)
    limits = Limits(1024, 64)
    made = plan(requests, limits)
    for batch in [batch for subtree in made.subtrees for batch in subtree.batches]:
        for suffix_batch in batch.suffix_batches:
            width = max(len(suffix.tokens) for suffix in suffix_batch)
            assert len(suffix_batch) * width <= 1024
            assert sum(width - len(suffix.tokens) for suffix in suffix_batch) <= 64
    everything = plan(requests, share=False)
    assert work(everything).tokens == naive(requests)


def test_caches_stay_within_their_memory():
    limits = Limits(10**6, 10**6, row_bytes=100, token_bytes=10, cache_bytes=5000)
    for batch in [one for subtree in plan([*choices(30), *letters(30)], limits).subtrees for one in subtree.batches]:
        before = max(map(len, batch.prefixes), default=0)
        assert len(batch.prefixes) * (100 + 10 * before) <= 5000
        for suffix_batch in batch.suffix_batches:
            assert (
                len(suffix_batch) * (100 + 10 * (before + max(len(suffix.tokens) for suffix in suffix_batch))) <= 5000
            )


def test_equal_requests_are_scored_once():
    requests = [LoglikelihoodRequest(i, j, (1, 2), (option,)) for i in range(10) for j, option in enumerate((3, 4))]
    rows = make_rows(requests, 100)
    assert len(rows.rows) == 2 and rows.row_of == [0, 1] * 10


def test_the_window_cuts_contexts_from_the_left():
    rows = make_rows(
        [LoglikelihoodRequest(0, 0, tuple(range(10)), (90, 91)), LoglikelihoodRequest(0, 1, (1,), (92, 93, 94))], 4
    )
    assert rows.rows == [Row((7, 8, 9, 90, 91), 2), Row((1, 92, 93, 94), 3)]
    assert rows.truncated == [7, 0]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LoglikelihoodRequest(7, 2, (), (1,)), "document 7, option 2: an empty context cannot be scored"),
        (LoglikelihoodRequest(7, 2, (1,), ()), "document 7, option 2: an empty continuation cannot be scored"),
        (LoglikelihoodRequest(7, 2, (1,), (1,) * 5), "a continuation of 5 tokens does not fit the model's window of 4"),
    ],
)
def test_what_has_no_score_is_refused(request_, message):
    with pytest.raises(EvalError, match=message):
        make_rows([request_], 4)


def best_by_trying(common: list[int], price: int) -> int:
    """The most that can be saved by one run of all items, or by runs of the parts that have more in common."""
    if not common:
        return 0
    least = min(common)
    parts = [list(group) for more, group in itertools.groupby(common, key=lambda depth: depth > least) if more]
    return max(least * len(common) - price, sum(best_by_trying(part, price) for part in parts))


@pytest.mark.parametrize("seed", range(200))
def test_runs_save_the_most(seed):
    rng = random.Random(seed)
    common = [rng.choice([0, 0, 1, 2, 3, 5, 8, 13]) for _ in range(rng.randint(0, 12))]
    price = rng.randint(1, 12)
    runs = best_runs(common, price)
    at = 0
    for start, stop, shared in runs:
        assert at <= start < stop - 1 < len(common) + 1
        assert shared == min(common[start : stop - 1])
        at = stop
    saved = sum(shared * (stop - start - 1) - price for start, stop, shared in runs)
    assert saved == best_by_trying(common, price)


def test_a_batch_ends_where_padding_would_pay_for_a_call():
    items = [10, 10, 9, 5, 5, 1]
    made = list(batch_sorted(items, rows=lambda first: 4, waste=lambda first, item: first - item, call_cost=6))
    assert made == [[10, 10, 9, 5], [5, 1]]
    assert list(batch_sorted([], rows=lambda first: 1, waste=lambda first, item: 0, call_cost=0)) == []
