# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
# Training on CPUs: all packages, a compiler for torch.compile, and the training examples.
#
#   nox -s wheels
#   docker build -f docker/train.Dockerfile -t ipex-train .
#   docker run --rm -v "$PWD/out:/out" ipex-train                       # an example
#   docker run --rm -v "$PWD:/app" ipex-train --nnodes 1 --nprocs-per-node 2 my_train.py
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
ARG TORCH=2.13.0
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "${TORCH_INDEX_URL}" "torch==${TORCH}"

# Our packages by path: no index is asked for packages of these names.
RUN --mount=type=bind,source=dist,target=/wheels \
    pip install numpy /wheels/ipex_core-*.whl /wheels/ipex_cpu_kernels-*.whl /wheels/ipex_quant-*.whl \
        /wheels/ipex_llm-*.whl /wheels/ipex_runtime-*.whl "$(echo /wheels/ipex-*.whl)[plot]"

COPY examples/training /examples

RUN useradd --uid 10001 --create-home --home-dir /home/ipex ipex
RUN install --directory --owner 10001 /out
ENV HOME=/home/ipex
VOLUME /out
WORKDIR /app
USER 10001

HEALTHCHECK NONE
# Options of ipexrun, a script, and its arguments.
ENTRYPOINT ["ipexrun", "--memory-allocator", "tcmalloc"]
CMD ["/examples/dlrm.py", "--steps", "20", "--fresh", "--out", "/out"]
