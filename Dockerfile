# psrl with veRL, Megatron-Core, TransformerEngine, flash-attn and vLLM for Hopper- and Blackwell-class GPUs, CUDA 13.
#
#   docker build -t psrl .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 psrl psrl doctor
#
# The versions are veRL 0.9.1's own set (extras megatron and vllm); `--build-arg ROLLOUT=sglang` takes SGLang instead.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

ARG ROLLOUT=vllm
# Parallel compilers of flash-attn and TransformerEngine: each takes several GB of memory.
ARG MAX_JOBS=8
ARG TORCH_CUDA_ARCH_LIST="9.0;10.0"

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    CUDA_HOME=/usr/local/cuda \
    CUDA_DEVICE_MAX_CONNECTIONS=1 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

RUN apt-get update && apt-get install -y --no-install-recommends \
        build-essential cmake git libibverbs-dev libnuma-dev ninja-build numactl python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv "$VIRTUAL_ENV" \
    && pip install --upgrade "pip>=25.1" "setuptools<82" wheel pybind11 ninja packaging

# What changes rarely, first: torch and the rollout in one resolution, then what is compiled against that torch.
RUN pip install "verl[${ROLLOUT}]==0.9.1" "megatron-core==0.16.1" "numpy>=2.0"
RUN NVTE_FRAMEWORK=pytorch FLASH_ATTN_CUDA_ARCHS="$(tr -d . <<<"${TORCH_CUDA_ARCH_LIST}")" \
    pip install --no-build-isolation "flash-attn==2.8.3" "transformer-engine[core_cu13,pytorch]>=2.9,<2.12"

WORKDIR /opt/psrl
COPY . .
RUN pip install --no-build-isolation "hatchling>=1.26" editables \
    && pip install --no-build-isolation -e ".[gpu,${ROLLOUT},textworld,search,tokenizers,plots]" \
    && scripts/apply_patches.sh --python "$VIRTUAL_ENV/bin/python" \
    && pip check

# No GPU is visible while an image is built; what does not need one has to be right already.
RUN psrl doctor

CMD ["psrl", "doctor"]
