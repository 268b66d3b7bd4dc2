"""Markers -> manifest: what is committed, what is left over, and whether every line of the input is accounted for.

- `index`: the driver's copy of the markers
- `markers`: which of them exist and count
- `leftovers`: what dead attempts left
- `build`: conservation, `manifest.json`, `_rejects/`
"""

from hs_ray.manifest.build import build_manifest, check_conservation
from hs_ray.manifest.index import MarkerIndex
from hs_ray.manifest.leftovers import clean_leftovers
from hs_ray.manifest.markers import distrust, drop_untrusted, list_markers, read_markers

__all__ = [
    "MarkerIndex",
    "build_manifest",
    "check_conservation",
    "clean_leftovers",
    "distrust",
    "drop_untrusted",
    "list_markers",
    "read_markers",
]
