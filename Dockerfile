# hs_ray on a GPU cluster: SGLang's image, Ray, and the wheel. Not root.
#   docker build -t registry.example.com/hs-ray:0.1.0 .
# Pin by digest where you build: --build-arg BASE=lmsysorg/sglang@sha256:...
ARG BASE=lmsysorg/sglang:v0.5.23-cu129

FROM python:3.12.12-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY hs_ray hs_ray
COPY jobs jobs
COPY patches patches
RUN pip wheel --no-cache-dir --no-deps -w /wheels .

FROM ${BASE}
COPY --from=wheel /wheels /wheels
# sglang and torch are the image's; the check refuses a release that is not patched.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN command -v python || ln -s "$(command -v python3)" /usr/local/bin/python
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[extract]" \
    && python3 -c "from hs_ray.engine.patching import check_installed; check_installed()" \
    && rm -r /wheels
RUN useradd --create-home --uid 1000 ray && mkdir /cache && chown ray:ray /cache
USER 1000
WORKDIR /home/ray
ENV HS_RAY_CACHE=/cache \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
ENTRYPOINT []
CMD ["python3", "-m", "hs_ray", "extract", "--help"]
