"""Files of rollouts: RUN/rollouts/rollout-N holds MDS shards of the answers that were drawn before step N, each a sample with its
reward, as `llmtrain data show` reads them; also data to train on, in which answers are marked."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.held_folder import require_in_place
from llmtrain.data.shards.index import FLAG_COLUMN, ShardError
from llmtrain.data.shards.mds_writer import ShardWriter, write_index
from llmtrain.data.shards.packing import ENDS, TRAINED, token_dtype
from llmtrain.data.shards.stored_stream import open_place
from llmtrain.train.rollouts.answers import Answer

_NUMBERS = {"advantage": "float32", "reward": "float32", "over_long": "uint8", "sample": "int64", "step": "int64"}
"""Columns of one number for each answer. reward: NaN of a group that was set aside. step: that trains it first, from 0."""
_LOG_P = ("log_p", "old_log_p")
"""Columns of a number for each token: NaN outside of answers, and where it is not known."""


class RolloutFiles:
    """Rollouts of a run, a folder each. keep: number of the newest; None: all."""

    def __init__(self, run_dir: Path, vocab_size: int, seq_len: int, tokenizer: Path | None, keep: int | None):
        self.root, self.seq_len, self.keep = run_dir / "rollouts", seq_len, keep
        self.dtype, self.tokenizer = token_dtype(vocab_size), tokenizer
        columns = {name: (kind, np.dtype(kind).itemsize) for name, kind in _NUMBERS.items()}
        columns |= dict.fromkeys(_LOG_P, (f"ndarray:float32:{seq_len}", 4 * seq_len))
        columns[FLAG_COLUMN] = (f"ndarray:uint8:{seq_len}", seq_len)
        columns["tokens"] = (f"ndarray:{self.dtype}:{seq_len}", seq_len * np.dtype(self.dtype).itemsize)
        self.columns = dict(sorted(columns.items()))

    def write(self, step: int, answers: list[Answer]) -> None:
        """Write the rollout before a step, from 0, in place of one that is there. Raises OSError; then it is not there."""
        require_in_place(self.root)
        self.root.mkdir(parents=True, exist_ok=True)
        tokenizer = self.root / "tokenizer"
        if self.tokenizer is not None and not tokenizer.exists():
            shutil.copytree(self.tokenizer, tokenizer)
        folder = self._folder(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        writer = ShardWriter(folder, "shard", self.columns)
        writer.write(np.concatenate([self._row(one)[None] for one in answers]))
        write_index(folder, writer.finish())
        if self.keep is not None:
            for old in sorted(self.root.glob("rollout-" + "[0-9]" * 8))[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)

    def read(self, step: int) -> list[Answer] | None:
        """The rollout that holds the answers of a step, from 0: the newest that begins there or before. None where there is none,
        or none that is whole."""
        begun = [path for path in self.root.glob("rollout-" + "[0-9]" * 8) if _step_of(path) <= step]
        if not begun:
            return None
        try:
            return self._read(str(max(begun)))
        except ShardError:
            return None

    def _read(self, place: str) -> list[Answer] | None:
        stream = open_place(place)
        if stream is None:
            return None
        found = []
        for shard in range(len(stream.index.shards)):
            tokens, flags, columns = stream.tokens(shard), stream.flags(shard), stream.columns(shard)
            assert flags is not None
            found += [
                self._answer(tokens[row], flags[row], {name: of[row] for name, of in columns.items()})
                for row in range(len(tokens))
            ]
        return found

    def _row(self, answer: Answer) -> NDArray[np.uint8]:
        length = len(answer.prompt) + len(answer.ids)
        tokens = np.zeros(self.seq_len, self.dtype)
        log_p = np.full((2, self.seq_len), np.nan, np.float32)
        flags = np.full(self.seq_len, ENDS, np.uint8)
        tokens[:length] = [*answer.prompt, *answer.ids]
        flags[: length - 1] = 0
        flags[len(answer.prompt) : length] |= TRAINED
        log_p[0, len(answer.prompt) : length] = answer.log_p
        if answer.old:
            log_p[1, len(answer.prompt) : length] = answer.old
        values: dict[str, Any] = {
            "advantage": answer.advantage,
            "reward": answer.reward,
            "over_long": answer.over_long,
            "sample": answer.sample,
            "step": answer.step,
            "log_p": log_p[0],
            "old_log_p": log_p[1],
            FLAG_COLUMN: flags,
            "tokens": tokens,
        }
        kinds = {
            name: np.dtype(kind.split(":")[1] if ":" in kind else kind) for name, (kind, _) in self.columns.items()
        }
        return np.concatenate([np.atleast_1d(np.asarray(values[n], k)).view(np.uint8) for n, k in kinds.items()])

    def _answer(self, tokens: NDArray, flags: NDArray[np.uint8], of: dict[str, Any]) -> Answer:
        trained = np.flatnonzero(flags & TRAINED)
        begin, end = (int(trained[0]), int(trained[-1]) + 1) if len(trained) else (0, 0)
        return Answer(
            sample=int(of["sample"]),
            step=int(of["step"]),
            prompt=tokens[:begin].tolist(),
            ids=tokens[begin:end].tolist(),
            log_p=of["log_p"][begin:end].tolist(),
            old=[] if np.isnan(of["old_log_p"][begin:end]).all() else of["old_log_p"][begin:end].tolist(),
            over_long=bool(of["over_long"]),
            reward=float(of["reward"]),
            advantage=float(of["advantage"]),
        )

    def _folder(self, step: int) -> Path:
        return self.root / f"rollout-{step + 1:08}"


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("rollout-")) - 1
