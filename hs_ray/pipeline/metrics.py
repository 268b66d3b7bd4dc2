"""What Prometheus is told; `jobs/grafana` shows it."""

from ray.util.metrics import Counter

from hs_ray.schema import Marker


class Metrics:
    """Prometheus counters, at the node's metrics port. engine: `driver` for what is counted before there is one."""

    def __init__(self, engine: str, node: str):
        tags = {"engine": engine, "node": node}

        def counter(name: str, text: str) -> Counter:
            made = Counter(name, description=text, tag_keys=tuple(tags))
            made.set_default_tags(tags)
            return made

        self._tokens = counter("hs_tokens_total", "Tokens whose states were written")
        self._samples = counter("hs_samples_total", "Samples committed")
        self._bytes = counter("hs_bytes_written_total", "Bytes of committed shards")
        self._rejected = counter("hs_rejected_total", "Lines rejected, and samples that failed in an engine")
        self._busy = counter("hs_engine_busy_seconds_total", "Seconds with at least one sample in the engine")
        self._waited = counter("hs_writer_wait_seconds_total", "Seconds that samples waited for the writers")

    def tokens(self, count: int) -> None:
        self._tokens.inc(count)

    def busy(self, seconds: float) -> None:
        if seconds > 0:
            self._busy.inc(seconds)

    def waited(self, seconds: float) -> None:
        if seconds > 0:
            self._waited.inc(seconds)

    def rejected(self, lines: int) -> None:
        if lines:
            self._rejected.inc(lines)

    def committed(self, marker: Marker) -> None:
        for counter, value in (
            (self._samples, marker.samples),
            (self._bytes, marker.bytes),
        ):
            if value:
                counter.inc(value)
        self.rejected(len(marker.failed))
