"""Environment variables that training launchers of the vendors set. No torch here."""

from llmtrain.kernels.platform import Vendor

PRESETS: dict[Vendor, dict[str, str]] = {
    # AMD's training launcher (Primus; ROCm's images for PyTorch training). Not measured by us.
    "amd": {
        "HSA_ENABLE_SDMA": "1",
        "HSA_NO_SCRATCH_RECLAIM": "1",
        "GPU_MAX_HW_QUEUES": "2",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "NCCL_CHECKS_DISABLE": "1",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_CROSS_NIC": "0",
        "NCCL_PXN_DISABLE": "1",
        "NCCL_P2P_NET_CHUNKSIZE": "524288",
        "RCCL_MSCCL_ENABLE": "0",
    },
    # torchtitan's launcher. Not measured by us.
    "nvidia": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "cpu": {},
}
