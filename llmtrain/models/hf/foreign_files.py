"""Files that others wrote, read by torch or transformers: the reason why one cannot be. No torch here."""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """The cause in an error of torch.load or transformers, without its advice, which is to run what the file holds.

    No code of a file is run here: weights_only is true and trust_remote_code false wherever one is read.
    """
    text = str(error).strip()
    if "trust_remote_code" in text:
        return "it comes with Python code of its own (auto_map), which is not run here"
    cause = text.partition("WeightsUnpickler error: ")[2] or text
    first = next(iter(cause.strip().splitlines()), "").partition(" Please use ")[0]
    if "weights_only" in first or "torch.load" in first:
        return "it is no file of plain tensors, and code in a file is not run here"
    return first or type(error).__name__
