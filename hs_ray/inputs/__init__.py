"""The input: files -> lines -> samples or rejects. Plain functions; `pipeline` runs `iter_chunk` in Ray actors.

- `sources`: files, their formats, chunks, raw lines
- `overlap`: input and output that lie in one another
- `records`: a line -> a record, or a reject code
- `messages`: conversations, in OpenAI's and ShareGPT's spelling
- `chat`: chat templates -> token ids and loss masks
- `samples`: a record -> token ids and loss mask, checked
- `read`: a chunk -> Arrow tables, one row a line
"""

from hs_ray.inputs.overlap import overlaps
from hs_ray.inputs.read import iter_chunk, read_chunk
from hs_ray.inputs.records import REJECT_CODES
from hs_ray.inputs.samples import TokenizeSettings
from hs_ray.inputs.sources import Chunk, Source, content_digests, list_sources, split_sources

__all__ = [
    "REJECT_CODES",
    "Chunk",
    "Source",
    "TokenizeSettings",
    "content_digests",
    "iter_chunk",
    "list_sources",
    "overlaps",
    "read_chunk",
    "split_sources",
]
