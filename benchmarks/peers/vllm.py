"""vLLM with what it imports, cut down to what serves text on one NVIDIA architecture: an archive of about 20 MB instead of 2 GB.

    python benchmarks/peers/vllm.py OUT.tar.xz [--version 0.26.0] [--arch 90] [--uv "python3 -m uv"]

For a machine that has torch, transformers and Python 3.12, but no internet: unpack it into a folder, and make an interpreter for
`python -m benchmarks serving --vllm` of it by `exec env PYTHONPATH=FOLDER python3 "$@"`, or a server for `llmtrain bench serve` by
`PYTHONPATH=FOLDER python3 -m vllm.entrypoints.cli.main serve MODEL`. Other architectures' code becomes zeros; FlashAttention,
experts, vision and what reads grammars are left out or stand-ins, so name attention_backend TRITON_ATTN and switch FlashInfer's
sampler off (VLLM_USE_FLASHINFER_SAMPLER=0). It has served Nemotron-H and Zamba2 on an H100.
"""

import argparse
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llmtrain.errors import exit_with

PACKAGES = (
    *("annotated-doc", "annotated-types", "astor", "attrs", "blake3", "cachetools", "cbor2"),
    *("click", "h11", "jmespath", "model-hosting-container-standards", "prometheus-fastapi-instrumentator"),
    *("compressed-tensors==0.17.0", "depyf==0.20.0", "dill", "diskcache", "distro", "fastapi<0.137", "gguf", "ijson"),
    *("jiter", "jsonschema", "jsonschema-specifications", "lark==1.2.2", "loguru", "mistral-common", "msgspec"),
    *("openai==2.40.0", "openai-harmony==0.0.8", "opentelemetry-api", "partial-json-parser", "pybase64", "pycountry"),
    *("pydantic", "pydantic-core", "prometheus-client", "py-cpuinfo", "pydantic-extra-types", "python-json-logger"),
    *("pyzmq", "referencing", "rpds-py", "setproctitle", "sniffio", "starlette>=1", "typing-inspection"),
    *("python-multipart", "uvicorn", "uvloop"),
)
"""What vLLM 0.26 imports to serve text, and torch, transformers and their requirements do not bring."""
LEFT_OUT = (
    *("vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100", "vllm/third_party/tml_fa4", "vllm/vllm-rs"),
    *("vllm/_moe_C*", "vllm/_qutlass*", "vllm/_flashmla*", "vllm/_rust*", "vllm/vllm_flash_attn/*.so"),
    *("vllm/vllm_flash_attn/cute", "vllm/kernels/helion/configs", "vllm/entrypoints/serve/instrumentator/static"),
    *("mistral_common/data", "pycountry/locales", "bin", "**/__pycache__", "**/tests"),
)
STAND_IN = '''"""Stands in for what is not used here."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
_FATBIN, _MACHINE_CODE = struct.pack("<IH", 0xBA55ED50, 1), 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--version", default="0.26.0")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--uv", default="uv", help="command of uv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        target = ["--target", str(site), "--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28"]
        wanted = [f"vllm=={args.version}", *PACKAGES]
        subprocess.run([*shlex.split(args.uv), "pip", "install", "--no-deps", *target, *wanted], check=True)
        cut_down(site, args.arch)
        packed = ["tar", "-C", site, "-I", "xz -9e -T0", "-cf", args.out.resolve(), "."]
        subprocess.run(packed, check=True)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


def cut_down(site: Path, arch: int) -> None:
    """Leave out files and other architectures' code, and put stand-ins in the places of packages."""
    for pattern in LEFT_OUT:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    packages = [f"{name}/__init__.py" for name in ("llguidance", "watchfiles", "xgrammar")]
    for name in (*packages, "vllm/vllm_flash_attn/_vllm_fa2_C.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(STAND_IN, encoding="utf-8")
    for file in site.glob("vllm/*.so"):
        content = bytearray(file.read_bytes())
        keep_architecture(content, arch)
        file.write_bytes(content)


def keep_architecture(content: bytearray, arch: int) -> int:
    """Write zeros over all code in CUDA's fatbins but the machine code of sm_`arch` and its variants. Returns the bytes kept."""
    kept = 0
    for kind, entry_arch, begin, end in list(_entries(bytes(content))):
        if kind == _MACHINE_CODE and entry_arch == arch:
            kept += end - begin
        else:
            content[begin:end] = bytes(end - begin)
    return kept


def _entries(content: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture and place of the code of each entry. A fatbin's header has magic, version, its own size and that of its
    entries; an entry's begins with its kind, its own size and that of the code, and has the architecture at byte 28.
    """
    at = 0
    while (at := content.find(_FATBIN, at)) >= 0:
        own, size = struct.unpack_from("<HQ", content, at + 6)
        place, end = at + own, at + own + size
        while place < end:
            kind, _, header, code = struct.unpack_from("<HHIQ", content, place)
            (arch,) = struct.unpack_from("<I", content, place + 28)
            yield kind, arch, place + header, place + header + code
            place += header + code
        at = end


if __name__ == "__main__":
    exit_with(main)
