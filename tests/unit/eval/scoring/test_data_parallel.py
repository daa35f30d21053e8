"""Division of documents among ranks."""

import random

import pytest

from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest
from llmtrain.eval.scoring.data_parallel import chunks, group_by_document, partition, request_cost


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_get_every_document_once_and_about_the_same_work(ranks):
    rng = random.Random(0)
    costs = {document: rng.randint(1, 100) for document in range(200)}
    shares = partition(costs, list(costs), ranks)
    assert sorted(document for share in shares for document in share) == list(range(200))
    loads = [sum(costs[document] for document in share) for share in shares]
    assert max(loads) - min(loads) <= 100
    assert shares == partition(costs, list(costs), ranks)


def test_more_ranks_than_documents():
    assert sorted(map(len, partition({4: 1, 5: 2}, [4, 5], 4))) == [0, 0, 1, 1]


def test_chunks_hold_all_documents_in_order():
    costs = dict.fromkeys(range(25), 10)
    made = list(chunks(costs, 100))
    assert [len(chunk) for chunk in made] == [10, 10, 5]
    assert [document for chunk in made for document in chunk] == list(range(25))
    assert list(chunks({}, 100)) == []


def test_requests_by_document():
    requests = [
        LoglikelihoodRequest(7, 0, (1,), (2,)),
        LoglikelihoodRequest(3, 0, (1,), (2,)),
        LoglikelihoodRequest(7, 1, (1,), (2, 3)),
    ]
    assert group_by_document(requests) == {7: [0, 2], 3: [1]}
    assert request_cost(requests[2]) == 3
    assert request_cost(GenerateUntilRequest(0, (1, 2), (), 10)) > 12
