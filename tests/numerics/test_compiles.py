"""Every row of the tuning tables compiles for its architecture: no spills, within its memory, with matrix units.

The default run holds tests/data/compiled.json to the limits and compiles a few rows, first of those whose source has
changed since the file was written. `pytest -m compile` compiles them all.
"""

import random

import pytest

from llmtrain.kernels import tuning
from tests.support import offline

COUNT = 6


@pytest.fixture(scope="module")
def checks() -> list[offline.Check]:
    return offline.checks()


def test_the_reviewed_table_holds_every_row_and_each_fits(checks):
    known = offline.reviewed()
    missing = [check.key for check in checks if check.key not in known]
    assert not missing, (
        f"{len(missing)} rows are not in {offline.REVIEWED}; run python -m tests.support.offline --update"
    )
    assert not known.keys() - {check.key for check in checks}
    assert not [line for check in checks for line in offline.faults(check, known[check.key])]


def test_a_sample_compiles(checks):
    """What has changed since the review comes first; a row that has not must take what the table says."""
    chance = random.Random(0)
    changed = offline.stale(checks)
    same = [check for check in checks if check not in changed and check.own and check.task.operation == "attention"]
    wanted = chance.sample(changed, min(COUNT, len(changed))) + chance.sample(same, min(2, len(same)))
    found = list(offline.compile_all(wanted, 1))
    assert len(found) == len(wanted)
    known = offline.reviewed()
    for check, entry in found:
        assert not offline.faults(check, entry)
        assert check in changed or entry == known[check.key]


@pytest.mark.compile
@pytest.mark.parametrize("share", range(4))
@pytest.mark.parametrize("arch", offline.ARCHES)
def test_every_row_compiles(arch, share):
    mine = offline.checks([arch])[share::4]
    wrong = [line for check, entry in offline.compile_all(mine, 1) for line in offline.faults(check, entry)]
    assert not wrong, "\n".join(wrong)


def test_amd_rows_say_that_they_have_not_run():
    for arch in tuning.TABLES["amd"]:
        assert all(row.provenance == "compiled only" for row in tuning.read_shipped(arch).rows)


def test_a_row_that_spills_or_does_not_fit_is_a_fault(checks):
    """The check itself."""
    check = checks[0]
    good = {"registers": 1, "shared": 0, "spilled": 0, "occupancy": 1, "matrix": 1}

    def said(**change: int) -> list[str]:
        return offline.faults(check, {"failed": None, "kernels": {"k": {**good, **change}}})

    assert said() == []
    assert "spills 8" in said(spilled=8)[0]
    assert "no matrix instructions" in said(matrix=0)[0]
    assert "the row says" in said(shared=check.row.shared + 1)[0]
    assert "of shared memory, of" in said(shared=1 << 20)[0]
    assert offline.faults(check, {"failed": "E", "kernels": {}}) == [f"{check.key}: E"]
