"""A checkpoint's parameters, by their names in the model that the changes of `adapt` were made to."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llmtrain.adapt.base import Converter
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format.manifest import Manifest
from llmtrain.checkpoint.format.tensor_file import Entry
from llmtrain.convert.checkpoint_tensors import CheckpointTensors
from llmtrain.convert.tensor_reader import TensorReader


class CheckpointWeights(TensorReader):
    """Weights, or with `ema` the averages of those that were trained. Where changes added something beneath a module, its weights
    are merged when they are read: a module is in memory at a time.

    converters: the changes, in order, after they were made to a model. plain: names of the parameters of the model without them.
    Raises CheckpointError for a checkpoint without averages.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, plain: Collection[str], converters: Sequence[Converter], ema: bool
    ):
        self._tensors, self._converters = CheckpointTensors(folder, manifest), converters
        if ema:
            indexes.require_average(folder, self._tensors.stack[0].index)
        # Under averages also what has none: weights that were not trained, and states of layers.
        prefixes = ("model.", "ema.") if ema else ("model.",)
        self._stored = {name.removeprefix(prefix): name for prefix in prefixes for name in self._tensors.names(prefix)}
        modules, self._parts = {_module(name) for name in plain}, dict[str, list[str]]()
        for name in self._stored if converters else ():
            module = next((found for one in converters if (found := one.module_of(name))), _module(name))
            while module and module not in modules:
                module = _module(module)
            self._parts.setdefault(module, []).append(name)
        self._parts = {module: parts for module, parts in self._parts.items() if not set(parts) <= set(plain)}
        merged = {part for parts in self._parts.values() for part in parts}
        made = [item for module in self._parts for item in self._merged(module, torch.device("meta")).items()]
        entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made]
        for name, stored in self._stored.items():
            if name not in merged:
                entries.append(Entry(name, self._tensors.dtype(stored), self._tensors.shape(stored) or ()))
        super().__init__(folder, entries)

    def elements(self, name: str, counts: Iterable[int]) -> Iterator[Tensor]:
        if _module(name) not in self._parts:
            yield from self._tensors.elements(self._stored[name], counts)
        else:
            yield from self._merged(_module(name), torch.device("cpu"))[name].reshape(-1).split(list(counts))

    def verify(self, names: Iterable[str]) -> None:
        """Compare the hashes of the files that hold what these are made of. Raises CheckpointError."""
        self._tensors.verify(self._stored[part] for name in names for part in self._parts.get(_module(name), [name]))

    def _merged(self, module: str, device: torch.device) -> dict[str, Tensor]:
        found = {part: self._read(self._stored[part], device) for part in self._parts[module]}
        for converter in reversed(self._converters):
            found = converter.merged(found)
        return found

    def _read(self, name: str, device: torch.device) -> Tensor:
        shape = torch.Size(self._tensors.shape(name) or ())
        if device.type == "meta":
            return torch.empty(shape, dtype=self._tensors.dtype(name), device=device)
        [whole] = self._tensors.elements(name, [shape.numel()])
        return whole.view(shape)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
