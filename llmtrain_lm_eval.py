"""Makes `lm_eval --model llmtrain` known to lm-evaluation-harness 0.4.13, whose registry reads no entry points.

Its command looks a model up among those that are registered, before it reads any file of the user's (--include_path holds tasks).
Whatever else runs before that costs more than this does: a .pth file would run in every Python program, and a change to the
installed harness would be lost with its next installation. But the harness imports torch first, and torch calls the entry points
of `torch.backends` at the end of its import. Later releases of the harness read the entry point `lm_eval.models`; with them this
file can go.

torch cannot be imported where such an entry point fails. So this file imports nothing but the standard library, does nothing in
programs that have not imported lm_eval, and lies outside of the package: an installation, also an editable one, copies it beside
its metadata, so that the entry point leads somewhere wherever it is found.
"""

import contextlib
import sys
from importlib import import_module


def register() -> None:
    """Register the model's name in a process of the harness; the code is imported when the model is asked for. Never raises."""
    if "lm_eval" not in sys.modules:
        return
    with contextlib.suppress(Exception):
        import_module(
            "lm_eval.models"
        )  # which leaves out the harness's own models where another is registered before them
        from lm_eval.api.registry import model_registry

        if "llmtrain" not in model_registry:
            model_registry.register("llmtrain", target="llmtrain.eval.lm_eval_model:LlmtrainLM")
