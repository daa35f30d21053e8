"""Share of the sources that may be left out because it cannot be read: damaged files and records, and files that are not text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.data.partitions.report import NAMED_BAD_RECORDS, PartitionReport
from llmtrain.data.sources.files import NAMED_FILES, PrepareError, SourceFile
from llmtrain.data.sources.records import BadRecord

MOST_PASSED_OVER = 0.1
"""Share of the bytes found in folders that may turn out not to be text where max_bad is not given."""
_ROUNDING = 1e-9
"""Of sums of shares, relative: one of a hundred equal records is 1 %."""


@dataclass(frozen=True)
class Tolerance:
    """max_bad, skip_bad_records: as in PrepareConfig. All counts by stored bytes, as text and compressed text have no other measure
    in common: what is set aside whole by its own, a record by its share of its slice's."""

    max_bad: float | None = None
    skip_bad_records: bool = False

    def refuse(self, bad: BadRecord) -> None:
        """Raise PrepareError for what is not to be set aside, whatever its share."""
        if self.stops_at_damage if bad.fatal else self.stops_at_no_text:
            raise PrepareError(
                f"{bad}\nmend it, or skip such records with skip_bad_records (--skip-bad-records) or max_bad"
            )

    @property
    def stops_at_damage(self) -> bool:
        return not self.skip_bad_records and not self.max_bad

    @property
    def stops_at_no_text(self) -> bool:
        """True if a file found in a folder that is not text is an error like one that is damaged."""
        return not self.skip_bad_records and self.max_bad == 0

    def serves(self, report: PartitionReport) -> bool:
        """True if a partition that was made before, under another tolerance, has set nothing aside at which this one stops."""
        return not ((report.bad_count and self.stops_at_damage) or (report.passed_over_count and self.stops_at_no_text))

    def refuse_sum(self, reports: Sequence[PartitionReport], files: Sequence[SourceFile]) -> None:
        """Raise PrepareError if too much was set aside in all. files: all sources."""
        if self.max_bad is None:
            count = sum(report.passed_over_count for report in reports)
            lost = sum(report.passed_over_bytes for report in reports)
            self.refuse_no_text(files, count, lost, [name for report in reports for name in report.bad])
            return
        total = sum(file.size for file in files)
        lost = math.fsum(r.aside_bytes + r.passed_over_bytes + r.bad_bytes for r in reports) / max(total, 1)
        if self.skip_bad_records or lost <= self.max_bad * (1 + _ROUNDING):
            return
        count = sum(report.bad_count + report.passed_over_count for report in reports)
        raise PrepareError(
            f"{count:,} unreadable files or records are {lost:.3%} of the text; max_bad allows {self.max_bad:.3%}:\n"
            f"  {first_bad(reports)}\nmend them, or raise max_bad (--max-bad); what is finished is kept"
        )

    def refuse_no_text(self, files: Sequence[SourceFile], count: int, lost: int, named: Sequence[str]) -> None:
        """Raise PrepareError if, without max_bad, more than MOST_PASSED_OVER of what was found in folders is not text.

        files: all sources. count, lost: files that are not text, and their stored bytes; named: the first of them.
        """
        share = lost / max(sum(file.size for file in files if file.from_folder), 1)
        if self.skip_bad_records or self.max_bad is not None or share <= MOST_PASSED_OVER:
            return
        first = "\n  ".join([*named[:NAMED_FILES], *["..."] * (count > NAMED_FILES)])
        raise PrepareError(
            f"{count:,} files that are not UTF-8 text are {share:.1%} of the bytes found in folders, of which up to "
            f"{MOST_PASSED_OVER:.0%} are passed over:\n  {first}\nconvert them to UTF-8 (`iconv -f LATIN1 -t UTF-8`), or say with "
            "max_bad (--max-bad) how much of the text may be left out"
        )


def first_bad(reports: Sequence[PartitionReport]) -> str:
    """The first unreadable records, a line each."""
    return "\n  ".join([record for report in reports for record in report.bad][:NAMED_BAD_RECORDS])
