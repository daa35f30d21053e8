"""benchmarks.peers.vllm: what is left of a wheel."""

import struct
from pathlib import Path

from benchmarks.peers import vllm


def entry(kind: int, arch: int, code: bytes) -> bytes:
    return struct.pack("<HHIQIIII", kind, 0, 64, len(code), 0, 0, 0, arch).ljust(64, b"\1") + code


def fatbin(*entries: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)


def test_code_of_one_architecture_is_left():
    program, machine = 1, 2
    parts = [entry(machine, 80, b"a" * 8), entry(machine, 90, b"b" * 16), entry(program, 90, b"c" * 8)]
    whole = (
        b"host"
        + fatbin(*parts)
        + b"host" * 3
        + fatbin(entry(machine, 90, b"d" * 8), entry(machine, 100, b"e" * 8))
        + b"end"
    )
    content = bytearray(whole)
    assert vllm.keep_architecture(content, 90) == 24
    assert bytes(content) == whole.replace(b"a" * 8, bytes(8)).replace(b"c" * 8, bytes(8)).replace(b"e" * 8, bytes(8))
    assert vllm.keep_architecture(bytearray(b"no code"), 90) == 0


def test_what_is_not_used_is_left_out_or_stood_in_for(tmp_path: Path):
    for name in ("vllm/_moe_C.abi3.so", "vllm/_C.abi3.so", "vllm/envs.py", "bin/x", "vllm/third_party/deep_gemm/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(fatbin(entry(2, 80, b"a" * 8)))
    vllm.cut_down(tmp_path, 90)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    stand_ins = {f"{name}/__init__.py" for name in ("llguidance", "watchfiles", "xgrammar")}
    stand_ins.add("vllm/vllm_flash_attn/_vllm_fa2_C.py")
    assert found == {"vllm/_C.abi3.so", "vllm/envs.py", *stand_ins}
    assert b"a" * 8 not in (tmp_path / "vllm/_C.abi3.so").read_bytes()
    assert b"a" * 8 in (tmp_path / "vllm/envs.py").read_bytes()
