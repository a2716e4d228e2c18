"""Blocks joined into chunks, and what is written of them: ids for a Dataset, raw values for a log."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lpfs.data.simulation.spec import Spec
from lpfs.data.simulation.values import Array
from lpfs.data.simulate_world import BLOCK, Block, World
from lpfs.data.store.format import FIRST_ID

SEPARATOR = "|"  # between the values of a bag in a text file


def chunks(world: World, day: int, rows: int, chunk: int) -> Iterator[Block]:
    """Yield the rows of a day, about ``chunk`` at a time; which rows they are does not depend on it."""
    count = -(-rows // BLOCK)
    several = max(1, chunk // BLOCK)
    for first in range(0, count, several):
        numbers = range(first, min(first + several, count))
        yield join([world.block(day, at, min(BLOCK, rows - at * BLOCK)) for at in numbers])


def join(blocks: Sequence[Block]) -> Block:
    """Return the rows of several blocks as one."""
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    together = np.concatenate
    return Block(
        {name: together([each.ids[name] for each in blocks]) for name in first.ids},
        {name: together([each.numbers[name] for each in blocks]) for name in first.numbers},
        {
            name: (
                together([each.bags[name][0] for each in blocks]),
                together([each.bags[name][1] for each in blocks]),
            )
            for name in first.bags
        },
        {name: together([each.labels[name] for each in blocks]) for name in first.labels},
        together([each.logit for each in blocks]),
    )


def columns(world: World, block: Block) -> dict[str, Any]:
    """Return the arguments of ``DayWriter.append``."""
    return {
        "ids": {name: encoded(values) for name, values in block.ids.items()},
        "dense": {name: world.standardised(name, values) for name, values in block.numbers.items()},
        "bags": {name: encoded_bag(*bag) for name, bag in block.bags.items()},
        "labels": block.labels,
    }


def encoded(values: Array) -> Array:
    """Return the ids of values: missing is 0, the first value comes after the special ids."""
    return np.where(values < 0, 0, values + FIRST_ID)


def encoded_bag(values: Array, lengths: Array) -> tuple[Array, Array]:
    """Return the ids of a bag; an empty one holds the id of a missing value, as ``prepare`` has it."""
    ends = np.cumsum(lengths)
    empty = lengths == 0
    return np.insert(encoded(values), ends[empty], 0), np.where(empty, 1, lengths)


def scrambled(spec: Spec, values: Array) -> Array:
    """Return a 32-bit number for each value that tells nothing about it; different values stay different.

    Each step (xor with a shift, multiplication by an odd number) can be undone, so no two values meet.
    """
    mixed = (values.astype(np.uint64) + np.uint64(zlib.crc32(spec.name.encode()))) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed ^= mixed >> np.uint64(shift)
        mixed = (mixed * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return np.asarray(mixed ^ (mixed >> np.uint64(16)), np.uint32)
