"""The user's tuning rows and measured attention, read whole: on any machine, before a GPU reads them."""

from llmtrain.kernels import tuning
from llmtrain.kernels.attention import measured
from llmtrain.kernels.platform import Platform


def check(here: Platform) -> None:
    """Read the files that runs here would read, and on a machine without a GPU those of every architecture.

    Raises UserError for one that is wrong, or that LLMTRAIN_TUNING names and is missing.
    """
    if named := tuning.named_arch():
        architectures = [named]
    elif here.vendor == "cpu":
        architectures = [arch for known in tuning.TABLES.values() for arch in known]
    else:
        architectures = [here.arch]
    for arch in architectures:
        tuning.own_rows(arch)
        measured.read(measured.own_file(arch))
