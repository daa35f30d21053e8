# docker build --target cuda -t llmtrain:cuda .
# docker build --target rocm -t llmtrain:rocm .
# docker run --gpus all --ipc=host -v "$PWD:/workspace" llmtrain:cuda train mpt-1b
# docker run --device /dev/kfd --device /dev/dri --group-add video --group-add render --ipc=host \
#     -v "$PWD:/workspace" llmtrain:rocm train mpt-1b
# --user "$(id -u):$(id -g)": any user may run it, and what it writes is that user's (the images' own is 1000, and 1001 on ROCm).
# Both targets install the wheels of the first stage, as `pip install dist/*.whl` does (README.md), with all extras.
# Base images by digest: --build-arg PYTHON_IMAGE=python@sha256:… (--build-arg ROCM_IMAGE=…). Of packages, the index's state of
# UV_EXCLUDE_NEWER is taken; /opt/llmtrain/packages.txt in the image lists each with its version (docs/launching.md).
# UV_EXCLUDE_NEWER: as in pyproject.toml, whose overrides UV_NO_CONFIG leaves out: the wheels need none.
# libibverbs1, ibverbs-providers, librdmacm1: NCCL and RCCL load them for InfiniBand and RoCE; ibverbs-utils has ibv_devinfo.
# UV_COMPILE_BYTECODE: the image's user may not write any, and each rank would compile all it imports at every start.
# --ipc=host: NCCL shares memory between the ranks, and PyTorch between a rank and its loader processes.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG ROCM_IMAGE=rocm/pytorch:rocm7.14_ubuntu24.04_py3.12_pytorch_release_2.11.0

# ---------------------------------------------------------------------------------------------------------------------
# llmtrain's wheel, with its YAMLs and tasks inside, and those of Composer and streaming that it requires.
FROM ${PYTHON_IMAGE} AS wheels

WORKDIR /src
COPY pyproject.toml README.md LICENSE llmtrain_lm_eval.py ./
COPY scripts/build_wheels.py scripts/
COPY scripts/kubernetes scripts/kubernetes
COPY scripts/slurm scripts/slurm
COPY llmtrain llmtrain
COPY eval eval
COPY yamls yamls
RUN python scripts/build_wheels.py /wheels

# ---------------------------------------------------------------------------------------------------------------------
# CUDA: torch's wheels bring CUDA, cuDNN and NCCL; the host brings the driver. Triton needs a C compiler to run.
FROM ${PYTHON_IMAGE} AS cuda

# Versions are Debian's, fixed by the release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev git \
        libibverbs1 ibverbs-providers ibverbs-utils librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 trainer \
    # The home of every --user: caches of kernels, tokenizers and data sets. As in /tmp, files are their owners'.
    && chmod 1777 /home/trainer

ENV HOME=/home/trainer \
    PIP_NO_CACHE_DIR=1 \
    UV_NO_CACHE=1 \
    UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1 \
    UV_PYTHON_DOWNLOADS=never \
    UV_NO_CONFIG=1 \
    UV_EXCLUDE_NEWER=2026-11-15T00:00:00Z \
    PYTHONUNBUFFERED=1
RUN pip install 'uv==0.13.9'

WORKDIR /opt/llmtrain
# Dependencies first: this layer, most of the image, changes only with pyproject.toml.
COPY pyproject.toml ./
COPY --from=wheels /wheels/llmtrain_mosaicml* wheels/
RUN uv pip install --system --no-sources wheels/*.whl -r pyproject.toml --all-extras
COPY --from=wheels /wheels/llmtrain-* wheels/
RUN uv pip install --system wheels/*.whl && uv pip freeze --system > packages.txt

USER 1000
WORKDIR /workspace
ENTRYPOINT ["llmtrain"]
CMD ["--help"]

# ---------------------------------------------------------------------------------------------------------------------
# ROCm: AMD builds torch and Triton for the image's ROCm, and the package index has only CUDA builds under the same
# names. So we install into the image's own environment with overrides that require torch, torchvision and triton
# nowhere (scripts/keep_torch.py), and fail the build if any of them changed.
FROM ${ROCM_IMAGE} AS rocm

# What AMD's own training launcher sets.
ENV HSA_ENABLE_SDMA=1 \
    HSA_NO_SCRATCH_RECLAIM=1 \
    GPU_MAX_HW_QUEUES=2 \
    NCCL_CHECKS_DISABLE=1 \
    NCCL_IB_GID_INDEX=3 \
    NCCL_CROSS_NIC=0 \
    NCCL_PXN_DISABLE=1 \
    NCCL_P2P_NET_CHUNKSIZE=524288 \
    RCCL_MSCCL_ENABLE=0 \
    CUDA_DEVICE_MAX_CONNECTIONS=1 \
    TORCH_NCCL_HIGH_PRIORITY=1

ENV HOME=/home/trainer \
    PIP_NO_CACHE_DIR=1 \
    UV_NO_CACHE=1 \
    UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1 \
    UV_PYTHON_DOWNLOADS=never \
    UV_NO_CONFIG=1 \
    UV_EXCLUDE_NEWER=2026-11-15T00:00:00Z \
    PYTHONUNBUFFERED=1

# Root until everything is installed: the image's environment belongs to root.
# hadolint ignore=DL3002
USER 0
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /opt/llmtrain
COPY scripts/keep_torch.py scripts/
COPY --from=wheels /wheels wheels/
# Versions are Ubuntu's, fixed by the release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers ibverbs-utils librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m pip install 'uv==0.13.9' \
    && python3 scripts/keep_torch.py versions > /tmp/before \
    && python3 scripts/keep_torch.py overrides > /tmp/overrides.txt \
    && python3 -m uv pip install --python "$(command -v python3)" --break-system-packages \
        --override /tmp/overrides.txt wheels/llmtrain_mosaicml*.whl "$(echo wheels/llmtrain-*.whl)[fast,float8,lm-eval,ray]" \
    && python3 -m uv pip freeze --python "$(command -v python3)" > packages.txt \
    && python3 scripts/keep_torch.py versions | diff /tmp/before - \
    && python3 -c "import torch, llmtrain.cli; assert torch.version.hip, 'torch is no longer the ROCm build'" \
    && rm /tmp/before /tmp/overrides.txt \
    # Ubuntu's images have a user of uid 1000 already.
    && useradd --create-home --uid 1001 --groups video trainer \
    && chmod 1777 /home/trainer

USER 1001
WORKDIR /workspace
ENTRYPOINT ["llmtrain"]
CMD ["--help"]
