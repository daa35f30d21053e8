"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

from typing import Any

import pytest

from llmtrain.kernels import platform
from llmtrain.kernels.norm.triton import TritonNorm
from llmtrain.kernels.platform import Platform
from llmtrain.models.layers import Norm
from tests.support.models import build
from tests.support.packing import apart, assert_same, packed_batch, together

GPU = Platform("nvidia", "sm90", "", 1 << 36, 132)
LAYERS = {  # as few as show it: the interpreter is slow
    "mpt with alibi": "a",
    "mpt with learned positions and clipping": "a*2",
    "llama with grouped queries": "a",
    "mamba2 with groups": "m",
    "zamba2 as the 1.2B": "s+m",
}


MARKS = {
    "mpt with learned positions and clipping": pytest.mark.slow,
    "llama with grouped queries": pytest.mark.ci,
    "zamba2 as the 1.2B": pytest.mark.slow,
}


@pytest.mark.parametrize("name, layers", [pytest.param(*one, marks=MARKS.get(one[0], ())) for one in LAYERS.items()])
def test_a_packed_batch_equals_its_documents_apart(name, layers, monkeypatch):
    """The documents one by one through the reference."""
    batch = packed_batch()
    expected = apart(build(name, platform.cpu(), backend="reference", layers=layers), batch)
    ours: Any = build(name, GPU, device="cpu", backend="triton", layers=layers, documents=True)
    assert all(block.mixer.backend.name == "triton" for block in ours.hybrid.blocks)
    norms = {name: module for name, module in ours.named_modules() if isinstance(module, Norm)}
    residual = [norm for name, norm in norms.items() if not name.endswith(("q_norm", "k_norm"))]
    assert residual and all(isinstance(norm.kernel, TritonNorm) == (norm in residual) for norm in norms.values())
    used, call = set(), TritonNorm.__call__
    monkeypatch.setattr(TritonNorm, "__call__", lambda self, *given: used.add(id(self)) or call(self, *given))
    assert_same(together(ours, batch), expected, 1e-4)
    assert used == {id(norm.kernel) for norm in residual}
