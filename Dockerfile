# Two images from one source. `control`: daemon and live view, without torch. `trainer`: all that trains. They share the
# layer that has the packages of both.
#   docker build --target control --tag tidegate-control:0.1.0 .
#   docker build --target trainer --tag tidegate-trainer:0.1.0 .
# pip reads PIP_INDEX_URL and PIP_EXTRA_INDEX_URL from build arguments: name there where torch for your GPUs comes from.
# BuildKit builds it: it is what `docker build` has been since Docker 23, and what `docker compose` uses.
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The compiler comes with the base image's release of Debian, which fixes its version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS base
# The number is fixed: whoever mounts a folder has to give it to this user. Volumes take the folders' owner.
RUN groupadd --gid 10001 tidegate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tidegate \
    && install --directory --owner=10001 --group=10001 --mode=0700 \
       /var/lib/tidegate /var/lib/tidegate-runs /var/cache/tidegate /tide /tide/nvme /tide/pfs
ENV PATH=/opt/tidegate/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
ENTRYPOINT ["tidegate"]

FROM base AS packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# The base image's pip installs into this environment, also in images that are built on these.
ENV PIP_PYTHON=/opt/tidegate/bin/python
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Versions are what the wheel asks for. What only tests of packages need goes, and maps of scripts, and Arrow's headers
# and its parts for servers that nothing here speaks to.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python -m venv --without-pip /opt/tidegate \
    && wheel=$(echo /wheels/tidegate-*.whl) \
    && pip install --no-cache-dir "${wheel}[daemon,dashboard]" \
    && find /opt/tidegate/lib -depth -type d \( -name tests -o -path '*/pyarrow/include' \) -exec rm -r {} + \
    && find /opt/tidegate/lib -type f \
       \( -name '*.map' -o -path '*/pyarrow/*_flight*' -o -path '*/pyarrow/*_s3*' \) -delete

FROM packages AS control
ENV TIDEGATE_STATE_DIR=/var/lib/tidegate
USER 10001:10001
EXPOSE 8790 8501
CMD ["daemon", "--bind", "0.0.0.0", "--state-dir", "/var/lib/tidegate"]

FROM packages AS trainer
# Triton compiles a small C module when it first meets a GPU: compiler and headers. Python.h is in the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# Of torch, programs of tests go, too. Its headers stay, for extensions that others build.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    wheel=$(echo /wheels/tidegate-*.whl) \
    && pip install --no-cache-dir "${wheel}[demo]" \
    && find /opt/tidegate/lib -depth -type d \
       \( -name tests -o -path '*/torch/test' \) -exec rm -r {} + \
    && find /opt/tidegate/lib -type f -path '*/torch/bin/*' ! -name torch_shm_manager -delete
# What Triton compiles is loaded from here: a file system that forbids execution, as Docker's tmpfs does, will not do.
ENV TRITON_CACHE_DIR=/var/cache/tidegate/triton
WORKDIR /var/lib/tidegate-runs
USER 10001:10001
EXPOSE 9464
CMD ["train", "--headless", "--metrics-bind", "0.0.0.0", "--metrics-port", "9464"]
