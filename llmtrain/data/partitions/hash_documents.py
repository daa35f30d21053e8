"""Hashing the documents of a partition: what `dedup` compares."""

import numpy as np

from llmtrain.data.partitions.cutting import Partition
from llmtrain.data.partitions.dedup import DocumentHashes, position
from llmtrain.data.partitions.maker import PartitionMaker, refuse_changed
from llmtrain.data.partitions.prepared_folder import REPORTS
from llmtrain.data.sources.records import BadRecord, SetAside, Slice, read_slice
from llmtrain.data.sources.token_kinds import TokenKind, token_kind


def hash_documents(maker: PartitionMaker, partition: Partition) -> None:
    """Write the hashes of a partition's documents. maker: the one that will make it.

    Raises PrepareError at what cannot be read, where the settings say so.
    """
    hashes = DocumentHashes()
    for number, part in enumerate(partition.slices):
        mark = hashes.mark()
        try:
            if kind := token_kind(part.file.path, part.file.from_folder):
                _hash_tokens(maker, hashes, number, part, kind)
            else:
                _hash_texts(maker, hashes, number, part)
        except SetAside as error:
            maker.settings.tolerance.refuse(error.bad)
            hashes.back_to(mark)
        refuse_changed(part)
        maker.advance(part.end - part.begin)
    hashes.write(maker.settings.folder / REPORTS, partition.id)


def _hash_texts(maker: PartitionMaker, hashes: DocumentHashes, number: int, part: Slice) -> None:
    document, is_open = 0, False
    for item in read_slice(part, maker.settings.text_key):
        if isinstance(item, BadRecord):
            maker.settings.tolerance.refuse(item)
            continue
        hashes.add_text(item.text)
        is_open = not item.ends
        if is_open:
            continue
        if part.begin and item.name == part.file.name:  # the end of a text that began in another slice
            hashes.end_part(part, position(number, document))
        else:
            hashes.end(position(number, document))
        document += 1
    if is_open:
        hashes.end_part(part, position(number, document))


def _hash_tokens(maker: PartitionMaker, hashes: DocumentHashes, number: int, part: Slice, kind: TokenKind) -> None:
    document = 0
    for item in maker.token_files(part, kind):
        if isinstance(item, BadRecord):
            maker.settings.tolerance.refuse(item)
            continue
        batch, _, _ = item
        for ids in np.split(batch.ids, np.cumsum(batch.tokens)[:-1]) if len(batch.tokens) else ():
            hashes.add_tokens(ids)
            hashes.end(position(number, document))
            document += 1
