"""Which part of a stream is this rank's."""

from __future__ import annotations

from collections.abc import Iterable

from lpfs.data.batches.batch import Batch
from lpfs.data.stream import Stream
from lpfs.train.ranks import current


def shared(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Return this rank's part of every batch of a Stream; any other batches are its part already."""
    ranks = current()
    if ranks.several and isinstance(batches, Stream) and batches.world == 1:
        return batches.share(ranks.rank, ranks.world)
    return batches
