"""Seconds from the typed command to the end of the first step: `llmtrain train` cold and warm, beside a plain loop of transformers.

    python scripts/gpu/start_times.py --out FOLDER [--shapes llama-350m zamba2-1.2b nemotron-h-1b] [--starts 5] [--cold 1]
        [--limit 540] [--microbatch fixed auto] [--nproc 1] [--without-peer] [--checkout FOLDER] [a.b=c …]

Data are prepared before. Cold: no compiled kernels and no remembered microbatch; warm: both are there. A run is killed when its
first step is in its metrics. The peer builds the same model by its class in transformers, compiles each layer, and takes one step
of as many microbatches with torch's fused AdamW, on random tokens; cold and warm too.

FOLDER/starts.json has every start that is done, with the parts of llmtrain's; the same command again makes only the missing ones,
and so goes on where --limit seconds ended it. Printed are medians, least and most. A shape may also be the path of a YAML.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from llmtrain.data.prepare_streams import prepare_all
from llmtrain.distributed.processes import exit_on_sigterm
from llmtrain.schema.load import load_config

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "train.duration=100000 steps",
    "train.global_batch_size=16",
    "schedule.warmup=2 steps",
    "eval.interval=100000 steps",
    "checkpoint.interval=100000 steps",
    "logging.interval=1",
    "logging.tensorboard=false",
    "logging.progress_bar=false",
    "data.train=null",
    "data.validation=null",
)
SHAPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama-350m": (
        "yamls/pretrain/llama3-1b.yaml",
        (
            *("model.vocab_size=32000", "model.d_model=1024", "model.layers=attn*24", "model.blocks.attn.n_heads=16"),
            *("model.blocks.attn.n_kv_heads=16", "model.blocks.attn.mlp.d_ff=2816", "data.seq_len=2048"),
            "train.microbatch_size=8",
        ),
    ),
    "zamba2-1.2b": ("yamls/pretrain/zamba2-1.2b.yaml", ("train.microbatch_size=2",)),
    "nemotron-h-1b": ("yamls/bench/nemotron-h-1b.yaml", ("train.microbatch_size=4",)),
    "llama3-8b": (  # for two GPUs of 141 GB
        "yamls/pretrain/llama3-8b.yaml",
        (
            *("train.microbatch_size=1", "train.activation_checkpointing.type=full", "data.seq_len=4096"),
            "train.global_batch_size=4",
        ),
    ),
    "quickstart": ("yamls/quickstart.yaml", ("train.global_batch_size=8",)),  # on two CPU cores
}
DONE = "FIRST STEP DONE"


def main() -> int:
    args = _arguments()
    if args.plain:
        plain_step(args.shapes[0], args.overrides)
        return 0
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.limit
    exit_on_sigterm()  # so that the run below ends too
    record = args.out / "starts.json"
    done: dict[str, list[dict]] = json.loads(record.read_text()) if record.exists() else {}
    for shape in args.shapes:
        file, overrides = settings(shape, args.out, args.overrides)
        prepare = load_config(file, overrides).data.prepare
        assert prepare is not None
        prepare_all(prepare, progress=False)
        for way in [*args.microbatch, *([] if args.without_peer else ["transformers"])]:
            for state in ("cold", "warm"):
                name = f"{shape} {way} {state}"
                wanted = args.starts if state == "warm" or args.cold is None else args.cold
                while len(done.setdefault(name, [])) < wanted and not any("failed" in one for one in done[name]):
                    left = end - time.monotonic()
                    if left < 5:
                        print(f"--limit {args.limit}: the same command again goes on with {name}")
                        print(report(done))
                        return 1
                    found = start(args, shape, way, state == "cold", file, overrides, left)
                    if found is None:  # the limit
                        continue
                    done[name].append(found)
                    record.write_text(json.dumps(done, indent=1) + "\n")
                    print(f"{name}: {found.get('failed') or format(found['seconds'], '.1f') + ' s'}", flush=True)
    print(report(done))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the shapes', for all")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES)[:3], metavar="NAME")
    parser.add_argument("--microbatch", nargs="*", choices=("fixed", "auto"), default=["fixed", "auto"])
    parser.add_argument("--starts", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--cold", type=int, metavar="N", help="of these N, which at least 1 warm one needs")
    parser.add_argument(
        "--limit", type=float, default=540.0, metavar="SECONDS", help="of this program (default: %(default)s)"
    )
    parser.add_argument(
        "--nproc", type=int, default=1, help="processes of llmtrain; the peer has one (default: %(default)s)"
    )
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="measure this one's llmtrain (default: this script's)"
    )
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.out is None and not args.plain:
        parser.error("--out FOLDER is missing")
    return args


def settings(shape: str, out: Path, overrides: list[str]) -> tuple[str, list[str]]:
    """The YAML of a shape, and what replaces its settings."""
    file, own = SHAPES.get(shape, (shape, ()))
    path = str((ROOT / file).resolve() if shape in SHAPES else Path(file).resolve())
    vocabulary = "vocab_size: 4096, validation_fraction: 0, seq_len: '${data.seq_len}'"
    data = f"data.prepare={{sources: [stdlib], out: '{out}/data/{Path(path).stem}', {vocabulary}}}"
    return path, [*SETTINGS, *own, data, *overrides]


def start(
    args: argparse.Namespace, shape: str, way: str, cold: bool, file: str, overrides: list[str], limit: float
) -> dict | None:
    """Seconds of one start; `failed` with the last line of one that ended by itself. None for one that outlasted `limit`."""
    place = args.out / f"{Path(shape).stem}-{way}"
    caches, run = place / "caches", place / "run"
    if cold:
        shutil.rmtree(place, ignore_errors=True)
    for path in run.glob("*"):
        if path.name != "microbatch.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    caches.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(args.checkout), os.environ.get("PYTHONPATH")])),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    if way == "transformers":
        command = [sys.executable, str(Path(__file__).resolve()), "--plain", "--shapes", file, "--", *overrides]
    else:
        command = [
            sys.executable,
            "-m",
            "llmtrain",
            "train",
            "--nproc",
            str(args.nproc),
            file,
            *overrides,
            f"run_dir={run}",
        ]
        command += ["train.microbatch_size=auto"] if way == "auto" else []
    log, metrics = place / "log.txt", run / "metrics.jsonl"

    def finished() -> bool:
        if way == "transformers":
            return DONE in log.read_text(errors="replace")
        return metrics.exists() and b"\n" in metrics.read_bytes()

    with log.open("w") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=args.checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not finished():
                seconds = time.monotonic() - began
                if process.poll() is not None and not finished():
                    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
                    return {"failed": f"status {process.returncode}: {lines[-1][:200]}"}
                if seconds > limit:
                    return None
                time.sleep(0.02)
            found: dict = {"seconds": time.monotonic() - began}
            time.sleep(0.3)  # for the table of the parts
            with contextlib.suppress(OSError, ValueError, KeyError):
                found["parts"] = json.loads((run / "start.json").read_text())["parts"]
            return found
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def plain_step(file: str, overrides: list[str]) -> None:
    """One step of the config's model by its class in transformers, each layer compiled. Imports what such a program does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from llmtrain.models.hf.family import family_for_model

    config = load_config(file, overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    published = family_for_model(config.model).write_config(config.model)
    kind = published.pop("model_type")
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **published), dtype=torch.bfloat16)
    layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    if device.type == "cuda":
        for layer in layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    size = config.train.least_microbatch
    for _ in range(config.train.global_batch_size // size):
        tokens = torch.randint(config.model.vocab_size, (size, config.data.seq_len), device=device)
        (
            model(input_ids=tokens, labels=tokens, use_cache=False).loss / (config.train.global_batch_size // size)
        ).backward()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(DONE, flush=True)


def report(done: dict[str, list[dict]]) -> str:
    """A table: one line for each kind of start, with the longest parts of llmtrain's median start."""
    lines = [f"{'start':44} {'median':>8} {'least':>7} {'most':>7}  starts"]
    for name, starts in done.items():
        measured = sorted((one for one in starts if "seconds" in one), key=lambda one: one["seconds"])
        seconds = [one["seconds"] for one in measured]
        if seconds:
            middle = statistics.median(seconds)
            lines.append(f"{name:44} {middle:6.1f} s {seconds[0]:5.1f} s {seconds[-1]:5.1f} s  {len(seconds)}")
            parts = measured[len(measured) // 2].get("parts", {})
            lines += [f"    {part:52} {value:6.1f} s" for part, value in list(parts.items())[:6]]
        lines += [f"{name:44} {one['failed']}" for one in starts if "failed" in one]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
