"""The time that a batch takes in the stages of a pipeline, pass by pass, in the order of 1F1B and of its interleaved form in
torch.distributed.pipelining. No torch here."""

from collections.abc import Sequence

from llmtrain.schema.pipeline import rounds

_COUNTED = 8
"""Microbatches per stage from which on each further one is taken to last as long as those before."""


def pass_seconds(
    forward: Sequence[float], backward: Sequence[float], virtual: int, microbatches: int, handed_on: float = 0.0
) -> float:
    """Seconds from the first forward pass of a step to the end of its last backward pass.

    forward, backward: seconds of one microbatch in each part of the model, in order, of which a stage has `virtual`. handed_on:
    seconds that a tensor takes to another stage, in which 1F1B computes nothing.
    """
    stages = len(forward) // virtual
    assert len(forward) == len(backward) == stages * virtual
    most = max(_COUNTED * stages, stages + 1)
    if microbatches > most and (virtual == 1 or microbatches % stages == 0):  # of whole rounds
        times = [pass_seconds(forward, backward, virtual, n, handed_on) for n in (most // 2, most)]
        return times[1] + (microbatches - most) * (times[1] - times[0]) / (most - most // 2)
    orders = [order(stage, stages, virtual, microbatches) for stage in range(stages)]
    done: dict[tuple[bool, int, int], float] = {}
    clocks, places = [0.0] * stages, [0] * stages
    while any(place < len(of) for place, of in zip(places, orders, strict=True)):
        before = sum(places)
        for stage, of in enumerate(orders):
            while places[stage] < len(of):
                is_forward, part, number = of[places[stage]]
                source = part - 1 if is_forward else part + 1
                begin = clocks[stage]
                if 0 <= source < len(forward):
                    if (ready := done.get((is_forward, source, number))) is None:
                        break
                    sent = handed_on if stages > 1 else 0.0
                    begin = max(begin, ready) + sent if virtual == 1 else max(begin, ready + sent)
                clocks[stage] = begin + (forward if is_forward else backward)[part]
                done[of[places[stage]]] = clocks[stage]
                places[stage] += 1
        assert sum(places) > before, "each stage waits for another"
    return max(clocks)


def order(stage: int, stages: int, virtual: int, microbatches: int) -> list[tuple[bool, int, int]]:
    """Passes of a stage in turn: (forward, part of the model, microbatch)."""
    of_round = microbatches // rounds(stages, microbatches)
    total, later = virtual * microbatches, stages - 1 - stage
    first = min(later if virtual == 1 else (virtual - 1) * of_round + 2 * later, total)

    def at(step: int, is_forward: bool) -> tuple[bool, int, int]:
        span = step // of_round % virtual
        part = (span if is_forward else virtual - 1 - span) * stages + stage
        return is_forward, part, step // (of_round * virtual) * of_round + step % of_round

    if virtual == 1:
        of_round = 1
    passes = [at(step, True) for step in range(first)]
    for step in range(total - first):
        passes += [at(first + step, True), at(step, False)]
    return passes + [at(step, False) for step in range(total - first, total)]
