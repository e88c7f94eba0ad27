# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
# torch with the ops and their kernels, and no command line: a base for a service of your own.
#
#   nox -s wheels
#   docker build -f docker/ops.Dockerfile -t ipex-ops .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The small build of torch. Its wheels are also on mirrors: --build-arg TORCH_INDEX_URL=...
ARG TORCH=2.13.0
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "${TORCH_INDEX_URL}" "torch==${TORCH}"

# By path: no index is asked for packages of these names.
RUN --mount=type=bind,source=dist,target=/wheels \
    pip install --no-index /wheels/ipex_core-*.whl /wheels/ipex_cpu_kernels-*.whl

# NumPy would be larger than all of ipex, and neither torch nor ipex needs it.
ENV PYTHONWARNINGS="ignore:Failed to initialize NumPy:UserWarning"

RUN useradd --uid 10001 --create-home --home-dir /home/ipex ipex
ENV HOME=/home/ipex
WORKDIR /app
USER 10001

HEALTHCHECK --interval=1m --timeout=30s --start-period=30s \
    CMD ["python", "-c", "import ipex_core; assert ipex_core.op_info('rms_norm')['provider'] == 'cpu'"]
CMD ["python", "-c", "import ipex_core; print(ipex_core.doctor())"]
