# The operator and the agent: docker build --target operator -t concertina/operator:0.1.0 .
#                            docker build --target agent -t concertina/agent:0.1.0 .
# --build-arg BASE names another base image, for example of a mirror. It needs Debian 13 and its Python 3.13 in /usr/local.
# The labels source, version and revision are empty without --build-arg SOURCE, VERSION and COMMIT.
ARG BASE=docker.io/library/python:3.13-slim-trixie

FROM ${BASE} AS source
WORKDIR /src
COPY LICENSE ./
COPY requirements requirements
COPY tools/install-environment.sh tools/find-python.sh tools/
COPY operator operator
COPY trainer_image trainer_image

FROM source AS operator-environment
RUN tools/install-environment.sh /opt/concertina operator

FROM source AS agent-environment
RUN tools/install-environment.sh /opt/concertina agent

# The base image comes without the compiled standard library, and nothing may be written there later.
FROM ${BASE} AS compiled
# Nor does anything install packages: pip goes.
RUN rm -rf /usr/local/lib/python3*/site-packages/* /usr/local/lib/python3*/ensurepip /usr/local/bin/pip* \
    && python3 -m compileall -q -j 0 -x '/tests?/' /usr/local/lib/python3*

FROM compiled AS agent
COPY --from=agent-environment /opt/concertina /opt/concertina
ENV PATH=/opt/concertina/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ARG COMMIT=""
ARG SOURCE=""
ARG VERSION=""
LABEL org.opencontainers.image.title="concertina agent" \
    org.opencontainers.image.description="Agent of a concertina training job, which starts and watches the workers of a replica" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.source="$SOURCE" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.revision="$COMMIT"
ENTRYPOINT ["concertina-agent"]

FROM compiled AS operator
COPY --from=operator-environment /opt/concertina /opt/concertina
ENV PATH=/opt/concertina/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ARG COMMIT=""
ARG SOURCE=""
ARG VERSION=""
LABEL org.opencontainers.image.title="concertina operator" \
    org.opencontainers.image.description="Kubernetes operator for elastic training jobs" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.source="$SOURCE" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.revision="$COMMIT"
ENTRYPOINT ["concertina-operator"]
