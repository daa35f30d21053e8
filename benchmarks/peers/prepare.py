"""Other programs that turn JSON lines into token files or shards: one of them, on one corpus, for benchmarks/prepare.py.

Run by the Python of an environment that holds them (datasets, mosaicml-streaming, datatrove, gigatoken, and Megatron-LM's
repository with what it imports): `python benchmarks/peers/prepare.py PEER FOLDER OUT TOKENIZER WORKERS [MEGATRON]`. FOLDER
holds .jsonl files.
"""

import importlib
import os
import sys
import types
from pathlib import Path

SEQ_LEN = 2048


def datasets_and_mds_writer(folder: Path, out: Path, tokenizer: Path, workers: int) -> None:
    """`datasets.map` to tokenize, and StreamingDataset's MDSWriter for samples of SEQ_LEN: one process writes."""
    import numpy as np
    from datasets import load_dataset
    from streaming import MDSWriter
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = backend.token_to_id("<|endoftext|>")

    def encode(batch: dict) -> dict:
        return {"ids": [found.ids + [end] for found in backend.encode_batch_fast(batch["text"])]}

    rows = load_dataset(
        "json", data_files=[str(file) for file in sorted(folder.iterdir())], cache_dir=str(out / "cache")
    )
    tokens = rows["train"].map(encode, batched=True, remove_columns=["text"], num_proc=workers)
    columns = {"tokens": f"ndarray:uint16:{SEQ_LEN}"}
    rest = np.zeros(0, np.uint16)
    with MDSWriter(columns=columns, out=str(out / "shards"), compression="zstd", hashes=["xxh64"]) as writer:
        for row in tokens.with_format("numpy"):
            rest = np.concatenate([rest, row["ids"].astype(np.uint16)])
            while len(rest) >= SEQ_LEN:
                writer.write({"tokens": rest[:SEQ_LEN]})
                rest = rest[SEQ_LEN:]


def datatrove(folder: Path, out: Path, tokenizer: Path, workers: int) -> None:
    """datatrove's DocumentTokenizer, a task per file."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    pipeline = [
        JsonlReader(str(folder)),
        DocumentTokenizer(
            str(out),
            tokenizer_name_or_path=str(tokenizer / "tokenizer.json"),
            eos_token="<|endoftext|>",
            shuffle_documents=False,
            shuffle_chunk_size=None,
        ),
    ]
    tasks = len(list(folder.iterdir()))
    LocalPipelineExecutor(pipeline, tasks=tasks, workers=workers, logging_dir=str(out / "logs")).run()


def megatron(folder: Path, out: Path, tokenizer: Path, workers: int, repository: Path) -> None:
    """Megatron-LM's tools/preprocess_data_fast.py without its command line and without what its packages import, the trainer,
    which takes 20 s: gigatoken encodes a file, and IndexedDatasetBuilder writes .bin and .idx. One process, with `workers`
    threads."""
    for name in ("megatron", "megatron.core", "megatron.core.datasets", "megatron.core.dist_checkpointing"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(repository / name.replace(".", "/"))]
    import gigatoken

    importlib.import_module("megatron.core.parallel_state")  # before its utils, which imports it
    from megatron.core.datasets import indexed_dataset

    backend = gigatoken.Tokenizer(str(tokenizer / "tokenizer.json"))
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.iterdir()):
        documents = backend.encode_files(gigatoken.JsonlFileSource([str(file)], "text"), parallel=workers > 1)
        dtype = indexed_dataset.DType.optimal_dtype(backend.vocab_size)
        builder = indexed_dataset.IndexedDatasetBuilder(str(out / f"{file.stem}.bin"), dtype=dtype)
        builder.add_documents(documents, eod_token=0)
        builder.finalize(str(out / f"{file.stem}.idx"))


PEERS = {"datasets": datasets_and_mds_writer, "datatrove": datatrove, "megatron": megatron}

if __name__ == "__main__":
    name, source, target, tokenizer, workers, *more = sys.argv[1:]
    os.environ |= {"RAYON_NUM_THREADS": workers if name == "megatron" else "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    PEERS[name](Path(source), Path(target), Path(tokenizer), int(workers), *map(Path, more))
