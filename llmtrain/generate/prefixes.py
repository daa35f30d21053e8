"""Beginnings of prompts that were read before: keys, values and states, kept to be read once."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from llmtrain.models.cache import Cache


class PrefixCache:
    """Prefixes in pieces of `piece` tokens, of at most `limit` bytes together; the longest unused go first.

    Each piece holds the keys and values of its own tokens, and the states behind its last. A prompt that begins with them goes on
    there: it is read in the same pieces with and without this cache, hence with the same result in every bit.
    """

    def __init__(self, limit: int, piece: int):
        self.limit, self.piece = limit, piece
        self.nbytes = self.reused_tokens = 0
        self._pieces: OrderedDict[bytes, list[Tensor]] = OrderedDict()

    def restore(self, ids: Sequence[int], cache: Cache) -> int:
        """Fill an empty cache of one row with what is known of a prompt. Returns the number of its tokens, fewer than all."""
        found: list[bytes] = []
        for key in self._keys(ids[:-1]):
            if key not in self._pieces:
                break
            found.append(key)
        for number, key in enumerate(found):
            states = number == len(found) - 1
            self._copy(cache, self._pieces[key], number * self.piece, states)
        for key in reversed(found):  # a piece is of no use without those before it: they are kept longer
            self._pieces.move_to_end(key)
        self.reused_tokens += len(found) * self.piece
        cache.advance(len(found) * self.piece)
        return len(found) * self.piece

    def keep(self, ids: Sequence[int], cache: Cache) -> None:
        """Keep the last piece of what a cache of one row has read, `ids`, a whole number of pieces."""
        assert len(ids) % self.piece == 0 and cache.length == len(ids)
        *_, key = self._keys(ids)
        if key in self._pieces:
            return
        begin = len(ids) - self.piece
        tensors = [
            (tensor[0] if dim is None else tensor[0].narrow(dim - 1, begin, self.piece)).clone()
            for tensor, dim in cache.tensors()
        ]
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self.limit:
            return
        self._pieces[key] = tensors
        self.nbytes += size
        while self.nbytes > self.limit:
            _, oldest = self._pieces.popitem(last=False)
            self.nbytes -= sum(tensor.nbytes for tensor in oldest)

    def clear(self) -> None:
        """Forget all prefixes, as after a change of the model's weights."""
        self._pieces.clear()
        self.nbytes = 0

    def _copy(self, cache: Cache, piece: list[Tensor], begin: int, states: bool) -> None:
        for (tensor, dim), kept in zip(cache.tensors(), piece, strict=True):
            if dim is not None:
                tensor[0].narrow(dim - 1, begin, self.piece).copy_(kept)
            elif states:
                tensor[0].copy_(kept)

    def _keys(self, ids: Sequence[int]) -> Iterator[bytes]:
        """Keys of the whole pieces, each a digest of all tokens to its end."""
        digest = hashlib.blake2b(digest_size=32)
        for begin in range(0, len(ids) - self.piece + 1, self.piece):
            digest.update(np.asarray(ids[begin : begin + self.piece], dtype=np.int64).tobytes())
            yield digest.digest()
