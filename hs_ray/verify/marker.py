"""A marker against itself and the plan of its unit: what can be seen without its shard."""

import math
from collections.abc import Sequence, Set

from hs_ray.schema import CaptureSpec, Marker, Sample, marker_path, shard_path
from hs_ray.verify.report import Report


def check_marker(marker: Marker, spec: CaptureSpec, planned: Sequence[Sample], report: Report) -> None:
    path, columns = marker_path(marker.unit), spec.columns
    if not marker.attempt.startswith(f"{marker.epoch:04d}-"):
        report.add("marker", path, f"attempt {marker.attempt} is none of epoch {marker.epoch}")
    if marker.shard is None:
        return
    if marker.shard != shard_path(marker.unit, marker.attempt):
        report.add("marker", path, f"names {marker.shard}, which is no shard of attempt {marker.attempt}")
    if more := marker.columns.keys() - set(columns):
        report.add("marker", path, f"has statistics of {', '.join(sorted(more))}, which the run did not capture")
    for name, stats in marker.columns.items():
        if not (math.isfinite(stats.sum_squares) and math.isfinite(stats.absmax)):
            report.add("statistics", path, f"column {name}: sum_squares or absmax is no finite number")
    failed = {reject.sample_id for reject in marker.failed}
    _check_checksums(marker, columns, {s.sample_id for s in planned} - failed, report)
    _check_equal(marker, spec, report)


def _check_checksums(marker: Marker, columns: Sequence[str], committed: Set[str], report: Report) -> None:
    """Each column's is the sum of its samples'; an older marker has 0. A sample without any is told with its rows."""
    path = marker_path(marker.unit)
    if more := marker.checksums.keys() - committed:
        report.add("marker", path, f"has checksums of {len(more)} samples that it did not commit, as {min(more)!r}")
    sums = list(marker.checksums.values())
    if any(len(of_sample) != len(columns) for of_sample in sums):
        return  # told with the rows
    for number, name in enumerate(columns):
        told = marker.columns[name].checksum if name in marker.columns else 0
        if told not in (0, found := sum(of_sample[number] for of_sample in sums) % 2**64):
            report.add("bits", path, f"column {name}: checksum is {told}, those of its samples give {found}")


def _check_equal(marker: Marker, spec: CaptureSpec, report: Report) -> None:
    """The state after the last layer and the final norm's input are one and the same."""
    last = f"hidden_{spec.num_hidden_layers}"
    if not {last, "final_pre_norm"} <= set(spec.columns):
        return
    a, b = spec.columns.index(last), spec.columns.index("final_pre_norm")
    others = [name for name, sums in marker.checksums.items() if len(sums) > max(a, b) and sums[a] != sums[b]]
    if others:
        detail = f"{len(others)} samples have other checksums, the first is {others[0]!r}"
        report.add("columns", marker_path(marker.unit), f"{last} and final_pre_norm should be equal; {detail}")
