# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
# The OpenAI-compatible server of ipex-llm.
#
#   nox -s wheels
#   docker build -f docker/serve.Dockerfile -t ipex-serve .
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/my-model:/model:ro" ipex-serve --dtype int4
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

# ipexrun preloads it: many small allocations of several threads are faster with it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
ARG TORCH=2.13.0
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "${TORCH_INDEX_URL}" "torch==${TORCH}"

# Our packages by path: no index is asked for packages of these names.
RUN --mount=type=bind,source=dist,target=/wheels \
    pip install /wheels/ipex_core-*.whl /wheels/ipex_cpu_kernels-*.whl /wheels/ipex_quant-*.whl \
        /wheels/ipex_runtime-*.whl /wheels/ipex-*.whl "$(echo /wheels/ipex_llm-*.whl)[serve,structured]"

RUN useradd --uid 10001 --create-home --home-dir /home/ipex ipex
ENV HOME=/home/ipex HF_HUB_OFFLINE=1
ENV MODEL=/model PORT=8000
WORKDIR /app
USER 10001
EXPOSE 8000

# Loading a large model takes minutes.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD python -c "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['PORT'] + '/health', timeout=5)"
# ipexrun: one thread on each core that the container may use, bound, and tcmalloc. It passes SIGTERM on.
ENTRYPOINT ["/bin/sh", "-c", "exec ipexrun --memory-allocator tcmalloc -m ipex llm serve --host 0.0.0.0 --port \"$PORT\" --model \"$MODEL\" \"$@\"", "serve"]
CMD ["--dtype", "bf16"]
