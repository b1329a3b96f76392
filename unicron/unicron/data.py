"""`fetch` for a session made easy: any micro-batch by iteration and index, whichever rank asks (docs/user-guide.md).

`Fetch` takes any dataset with random access and shuffles it without a table; `megatron` is for Megatron's GPTDataset.
`Tars` (WebDataset's layout) and `MDS` (MosaicML's) are such datasets in shards.
"""

from __future__ import annotations

from unicron_transition.data.fetch import Fetch, Permutation, megatron
from unicron_transition.data.mds import MDS
from unicron_transition.data.tars import Tars

__all__ = ["MDS", "Fetch", "Permutation", "Tars", "megatron"]
