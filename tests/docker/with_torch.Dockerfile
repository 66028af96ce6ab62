# Stands for an NGC image where none can be had: a torch of the system's own whose version no package index has, and pip held
# to other versions.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates && python3 -m venv /venv \
    && /venv/bin/pip --python /usr/bin/python3 install --break-system-packages --no-cache-dir torch==2.13.0 numpy==2.3.5 \
    && cd /usr/local/lib/python3.11/dist-packages && mv torch-*.dist-info torch-2.13.0a0+nv26.7.dist-info \
    && sed -i 's/^Version: .*/Version: 2.13.0a0+nv26.7/' torch-2.13.0a0+nv26.7.dist-info/METADATA \
    && rm -r /venv && echo 'numpy==2.3.5' >/constraint.txt
ENV PIP_CONSTRAINT=/constraint.txt
