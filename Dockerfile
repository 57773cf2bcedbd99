# Two images from one source. `control`: daemon and live view, without torch. `trainer`: all that trains.
#   docker build --target control --tag tidegate-control:0.1.0 .
#   docker build --target trainer --tag tidegate-trainer:0.1.0 .
# pip reads PIP_INDEX_URL and PIP_EXTRA_INDEX_URL from build arguments: name there where torch for your GPUs comes from.
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

FROM ${PYTHON_IMAGE} AS packages-control
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
COPY --from=build /wheels /wheels
RUN python -m venv /opt/tidegate \
    && wheel=$(echo /wheels/tidegate-*.whl) \
    && /opt/tidegate/bin/pip install --no-cache-dir "${wheel}[daemon,dashboard]"

FROM packages-control AS packages-trainer
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN wheel=$(echo /wheels/tidegate-*.whl) \
    && /opt/tidegate/bin/pip install --no-cache-dir "${wheel}[demo]"

FROM ${PYTHON_IMAGE} AS base
# The number is fixed: whoever mounts a folder has to give it to this user. Volumes take the folders' owner.
RUN groupadd --gid 10001 tidegate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tidegate \
    && install --directory --owner=10001 --group=10001 --mode=0700 \
       /var/lib/tidegate /var/lib/tidegate-runs /tide /tide/nvme /tide/pfs
ENV PATH=/opt/tidegate/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
USER 10001:10001
ENTRYPOINT ["tidegate"]

FROM base AS control
COPY --from=packages-control /opt/tidegate /opt/tidegate
ENV TIDEGATE_STATE_DIR=/var/lib/tidegate
EXPOSE 8790 8501
CMD ["daemon", "--bind", "0.0.0.0", "--state-dir", "/var/lib/tidegate"]

FROM base AS trainer
COPY --from=packages-trainer /opt/tidegate /opt/tidegate
WORKDIR /var/lib/tidegate-runs
EXPOSE 9464
CMD ["train", "--headless", "--metrics-bind", "0.0.0.0", "--metrics-port", "9464"]
