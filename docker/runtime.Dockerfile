# The image that programs start from: a cell's torch and the wheel for it in a small image of Python, as a user who may
# write nothing but a home. No ARG has a default: `python -m release runtime-image` fills them all from
# release/matrix.toml, and gives the index as the build context `site`.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

ENV PIP_ROOT_USER_ACTION=ignore \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# A layer of its own, which every release for that torch shares.
ARG TORCH
ARG TORCH_INDEX
# The arguments hold the versions.
# hadolint ignore=DL3013
RUN python -m pip install --no-cache-dir "${TORCH}" numpy ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"}
ARG CHANNEL
ARG WHEEL
# hadolint ignore=DL3013
RUN --mount=type=bind,from=site,target=/site \
    python -m pip install --no-cache-dir --no-deps --index-url "file:///site/${CHANNEL}/" "${WHEEL}" \
    && python -m pip check

COPY healthcheck.py /opt/scaled-mask-softmax/
RUN useradd --create-home --uid 1000 --user-group user
USER 1000
WORKDIR /home/user
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# What the container runtime mounts of the driver, where there is one.
ARG VISIBLE_DEVICES
ENV NVIDIA_VISIBLE_DEVICES=${VISIBLE_DEVICES} \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
HEALTHCHECK --interval=5m --timeout=2m --start-period=2m \
    CMD ["python", "/opt/scaled-mask-softmax/healthcheck.py"]
CMD ["python"]

ARG BASE_IMAGE
ARG VERSION
ARG SOURCE
LABEL org.opencontainers.image.title="scaled-mask-softmax" \
      org.opencontainers.image.description="${TORCH} and ${WHEEL}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="BSD-3-Clause" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
