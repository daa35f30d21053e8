"""What a pickle must not do when it is met."""

from pathlib import Path


class Bomb:
    """Makes the file `mark` when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")
