"""Verdicts of a campaign's trials: counts, and what each wrong one printed."""

from collections import Counter


class Findings:
    """good: verdicts that are no findings."""

    def __init__(self, *good: str):
        self.good = good
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def add(self, verdict: str, about: str) -> None:
        """Count a trial. about: what was tried and what came of it, which is printed if it is a finding."""
        self.counts[verdict] += 1
        if verdict not in self.good:
            self.wrong.append(f"== {verdict}: {about}")
            print(self.wrong[-1], flush=True)
        if self.counts.total() % 50 == 0:
            print(dict(self.counts), flush=True)

    def passed(self) -> Counter[str]:
        """The counts; fails with all findings."""
        print(dict(self.counts))
        assert not self.wrong, f"{dict(self.counts)}\n" + "\n".join(self.wrong)
        return self.counts
