"""How many slots of the pool have K/V: a walk over all that holds blocks, and no count kept up.

Guarded by the core's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prefixcache.core.form import FORM
from prefixcache.core.pool import PLAIN, Pool
from prefixcache.core.sequence import Sequence

_native_num_slots_written: Callable[[Pool, Iterable[Sequence]], int] | None = None
if FORM == "native":
    from prefixcache.core.native import slots as native_slots

    _native_num_slots_written = native_slots.num_slots_written


def num_slots_written(pool: Pool, holders: Iterable[Sequence]) -> int:
    """Slots of referenced blocks with complete K/V, each block counted once.

    holders: everything that holds blocks, each once.
    """
    if _native_num_slots_written is not None:
        return _native_num_slots_written(pool, holders)
    size = pool.block_size
    partial: dict[int, list[int]] = {}
    for sequence in holders:
        computed = sequence.num_computed
        for index in range(computed // size, len(sequence.block_table)):
            slots = max(0, computed - index * size)
            partial.setdefault(sequence.block_table[index], []).append(slots)
        for block in sequence.copy_holds:
            # The source of a copy counts by the tables that still have it.
            partial.setdefault(block, []).append(0)
    written = pool.num_referenced * size
    for block, fills in partial.items():
        # A block that is cached, or that one more holder has, is full for somebody.
        if pool.state_of(block) == PLAIN and pool.ref_cnt[block] == len(fills):
            written -= size - max(fills)
    return written
