"""A gauge for the search of a microbatch's size without a GPU."""

import time

from llmtrain.train import microbatch


class Gauge(microbatch.Gauge):
    """A GPU that there is not; what it says of its memory asks for no larger size, nor for a smaller one."""

    name, total = "fake", 1

    def __init__(self) -> None:
        pass

    def available(self) -> float:
        return 1.0

    def allocated(self) -> float:
        return 0.0

    def begin(self) -> None:
        pass

    def peak(self) -> float:
        return 1.0

    def seconds(self) -> float:
        return time.perf_counter()
