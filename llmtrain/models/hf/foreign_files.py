"""Files that others wrote, read by torch or transformers: the reason why one cannot be. No torch here."""

import os
from pathlib import Path

from llmtrain.errors import UserError


def refuse_links_out(folder: Path) -> None:
    """Raise UserError for a link in a folder that leads out of it: it would bring any file of this machine along. In the hub's
    cache the files of models--X/snapshots/REVISION are links to models--X/blobs."""
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    for place, folders, files in os.walk(root):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not any(path.resolve().is_relative_to(inside) for inside in allowed):
                target = os.readlink(path)
                raise UserError(f"{path} is a link that leads out of {folder}, to {target}: put the file itself there")


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
