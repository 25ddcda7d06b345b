# An image of Baton, for `baton emit kubernetes`:
#
#     docker build -t baton-serve .
#     docker build -t baton-serve --build-arg DEVICE=cuda .
#
# Reaches the package indexes of Debian, PyPI and torch, and nothing else. It keeps a compiler: the kernels of a
# processor without prepared ones, and Triton's on a GPU, are compiled when a worker starts.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

ARG DEVICE=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home baton \
 && install -d -o baton -g baton -m 700 /var/cache/baton

ENV PATH=/opt/baton/bin:$PATH \
    BATON_CACHE_DIR=/var/cache/baton \
    TRITON_CACHE_DIR=/var/cache/baton/triton \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

# torch is by far the largest layer: it changes with its own pin only.
COPY constraints.txt /tmp/constraints.txt
RUN python3 -m venv /opt/baton \
 && torch="$(grep '^torch==' /tmp/constraints.txt)" \
 && case "$DEVICE" in \
      cpu) pip install --no-deps --index-url "$TORCH_CPU_INDEX" "$torch" ;; \
      cuda) pip install -c /tmp/constraints.txt "$torch" ;; \
      *) echo "DEVICE is $DEVICE; it must be cpu or cuda" >&2; exit 2 ;; \
    esac

COPY . /tmp/baton
RUN pip install -c /tmp/constraints.txt /tmp/baton && baton version

USER 1000
RUN python -c "from baton.engine.kernels.build import LEVELS, library; print(*map(library, LEVELS), sep='\n')"
