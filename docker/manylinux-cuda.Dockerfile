# The image that a cell's wheels are built in: a manylinux image with the cell's host compiler, CUDA compiler and ccache.
# No ARG has a default: `python -m release image` fills them all from release/matrix.toml.
ARG BASE_IMAGE
ARG TOOLKIT_SOURCE

FROM ${BASE_IMAGE} AS toolkit-none
ARG GCC_TOOLSET
# The distribution keeps one version of each, so there is none to name.
# hadolint ignore=DL3041
RUN dnf install -y --setopt=install_weak_deps=False ccache "gcc-toolset-${GCC_TOOLSET}-gcc-c++" \
    && dnf clean all
ENV PATH=/opt/rh/gcc-toolset-${GCC_TOOLSET}/root/usr/bin:${PATH} \
    CMAKE_CXX_COMPILER_LAUNCHER=ccache \
    CMAKE_CUDA_COMPILER_LAUNCHER=ccache \
    CCACHE_DIR=/ccache

FROM toolkit-none AS toolkit-registry
ARG TOOLKIT_PACKAGES
# Any of the image's Pythons will do.
RUN set -- /opt/python/cp3*/bin/python \
    && "$1" -m pip install --no-cache-dir --target /opt/cuda "${TOOLKIT_PACKAGES}"

FROM toolkit-none AS toolkit-distribution
ARG NVIDIA_REPOSITORY
ARG TOOLKIT_PACKAGES
# Several packages, so not quoted; their names hold the version.
# hadolint ignore=DL3041,SC2086
RUN dnf config-manager --add-repo \
    "https://developer.download.nvidia.com/compute/cuda/repos/${NVIDIA_REPOSITORY}/cuda-${NVIDIA_REPOSITORY%/*}.repo" \
    && dnf install -y --setopt=install_weak_deps=False ${TOOLKIT_PACKAGES} \
    && dnf clean all

# A stage of this file.
# hadolint ignore=DL3006
FROM toolkit-${TOOLKIT_SOURCE}
ARG BASE_IMAGE
ARG TOOLKIT_FOLDER
# Where the build looks for a compiler that no variable names; in an image without one the link leads nowhere.
RUN ln -sfn "${TOOLKIT_FOLDER}" /usr/local/cuda
LABEL org.opencontainers.image.title="scaled-mask-softmax wheel builder" \
      org.opencontainers.image.licenses="BSD-3-Clause" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
