# syntax=docker/dockerfile:1
# draftsmith in a container, for a CPU:
#   docker build -t draftsmith .
#   docker run --rm -v "$PWD:/draftsmith" draftsmith quickstart
# and for NVIDIA cards, with CUDA as the wheels of torch bring it:
#   docker build -t draftsmith:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm --gpus all -v "$PWD:/draftsmith" draftsmith:cuda doctor
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG PIP_CACHE_DIR=/cache/pip
WORKDIR /source
COPY . .
# what pip keeps is on a mount, and in no layer
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/cache/pip \
    pip wheel --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_CACHE_DIR=/cache/pip

# Triton compiles what starts its kernels
# hadolint ignore=DL3008
RUN case "${TORCH_INDEX}" in */cpu) exit 0 ;; esac; \
    apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# a layer each for what seldom changes, and for what always does; torch by itself, as packages look for it when they are built
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/cache/pip \
    --mount=type=bind,source=constraints.txt,target=/source/constraints.txt \
    pip install -c /source/constraints.txt --extra-index-url "${TORCH_INDEX}" torch setuptools wheel

# hadolint ignore=DL3042
RUN --mount=type=cache,target=/cache/pip \
    --mount=type=bind,source=constraints.txt,target=/source/constraints.txt \
    --mount=type=bind,source=pyproject.toml,target=/source/pyproject.toml \
    python -c "import tomllib; print(*tomllib.load(open('/source/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > /needed.txt && \
    DS_BUILD_OPS=0 pip install -c /source/constraints.txt -r /needed.txt && rm /needed.txt

RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl

RUN useradd --create-home --uid 1000 draftsmith && install --directory --owner draftsmith /draftsmith
USER 1000:1000
WORKDIR /draftsmith
ENTRYPOINT ["draftsmith"]
CMD ["--help"]
