"""Documents and requests of a task for one model, without what is left out (`skip_bad_documents`). Imports no torch."""

from dataclasses import dataclass, replace

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.errors import BadDocuments, EvalError
from llmtrain.eval.prompts.chat import PLAIN, PromptStyle
from llmtrain.eval.prompts.requests import Request
from llmtrain.eval.run_config import EvalRun, TaskRun
from llmtrain.eval.scoring.overlap import Steps, run_steps
from llmtrain.eval.task import Documents, Task


@dataclass(frozen=True)
class Prepared:
    """Requests of a task to one model. documents: those that are scored; `skipped` has what was left out."""

    documents: Documents
    requests: list[Request]


def read_documents(task: Task, run: EvalRun) -> Documents:
    """Documents of a task. Raises EvalError for a source that cannot be read, and for bad records unless they are left out."""
    try:
        return task.documents(run.limit)
    except BadDocuments as error:
        return _some_left(error, error.rest, run)


def check_prompts(
    task_run: TaskRun,
    documents: Documents,
    tokenizer: TextTokenizer,
    max_seq_len: int,
    run: EvalRun,
    style: PromptStyle = PLAIN,
) -> None:
    """Check of a task's prompts, quick as only their ends are tokenised; where that finds something, whole prompts decide.

    max_seq_len: tokens that the model reads. Raises EvalError for what would make `prepare_steps` fail, but for the few prompts
    of which the end alone looks right.
    """
    try:
        task_run.task.check(documents, tokenizer, task_run.shots, max_seq_len=max_seq_len, pmi=run.pmi, style=style)
    except BadDocuments:
        run_steps(prepare_steps(task_run, documents, tokenizer, max_seq_len, run, style))


def prepare_steps(
    task_run: TaskRun,
    documents: Documents,
    tokenizer: TextTokenizer,
    max_seq_len: int,
    run: EvalRun,
    style: PromptStyle = PLAIN,
) -> Steps[Prepared]:
    """Requests of a task, made in steps. max_seq_len: tokens that the model reads.

    Raises EvalError for bad documents unless they are left out.
    """
    task = task_run.task
    try:
        requests = yield from task.request_steps(
            documents, tokenizer, task_run.shots, max_seq_len=task.window(max_seq_len) - 1, pmi=run.pmi, style=style
        )
    except BadDocuments as error:
        documents, requests = _without(documents, error, run), error.rest
    try:
        task.check_lengths(documents, requests, max_seq_len)
    except BadDocuments as error:
        documents, requests = _without(documents, error, run), error.rest
    return Prepared(documents, requests)


def _without(documents: Documents, error: BadDocuments, run: EvalRun) -> Documents:
    """Documents without the bad ones, which stay examples of others."""
    kept = [one for one in documents.evaluated if one.where not in error.reasons]
    return _some_left(error, replace(documents, evaluated=kept, skipped={**documents.skipped, **error.reasons}), run)


def _some_left(error: BadDocuments, documents: Documents, run: EvalRun) -> Documents:
    """The documents, where bad ones are to be left out; else the error is raised."""
    if not run.skip_bad_documents:
        raise error
    if not documents.evaluated:
        raise EvalError(f"{error}\n  no document is left")
    return documents
