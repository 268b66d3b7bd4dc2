"""One page about a run, for a browser: `_run/report.html`. Nothing else is needed to show it: no network, no script.

facts   what the output says: run.json, markers, rejects, the driver's history
charts  SVG and bars
page    the page
"""

from hs_ray.report.facts import Facts, collect
from hs_ray.report.page import REPORT, page, write_report

__all__ = ["REPORT", "Facts", "collect", "page", "write_report"]
