"""Decode through an attached view beside the same kernels on memory of this process's own.

The daemon is a process of its own, and idle. Both sides write the K/V of the new tokens and attend,
over as many blocks of the same ids with the same content. The view's sequences are put back where
they stood after each call, so every call is one of a layer in the middle of a step: what is made
once a step is made. Where the system puts its pages makes one pool up to 10 % slower than another,
so there are some pairs of a daemon and a private pool, which take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import cycle

import torch

from prefixcache.attached import attach
from prefixcache.attention.batch import make_batch
from prefixcache.attention.decode import decode
from prefixcache.attention.write_kv import write_kv
from prefixcache.bench.attention_cases import Case, Heads, Operation, Pool
from prefixcache.bench.children import daemon_process
from prefixcache.storage.layout import DTYPE_BYTES
from prefixcache.types import PLAIN_ATTENTION

PRIVATE, ATTACHED = "decode on private memory", "decode through an attached view"

_Decode = Callable[[], torch.Tensor]


def attached_case(
    heads: Heads,
    dtype: str,
    num_sequences: int,
    context: int,
    device: str,
    num_pairs: int,
    opened: ExitStack,
) -> Case:
    """One new token of each of some sequences of one length. opened: ends the daemons."""
    sizes = num_sequences, context
    pairs = [_pair(heads, dtype, *sizes, device, opened) for _ in range(num_pairs)]
    elements = 2 * heads.num_kv_heads * heads.head_dim * num_sequences * context
    num_bytes = elements * DTYPE_BYTES[dtype]
    return Case(
        f"Decode of {num_sequences} x {context:,} tokens, attached",
        dtype,
        (
            Operation(PRIVATE, _in_turn([private for private, _ in pairs]), num_bytes),
            Operation(ATTACHED, _in_turn([view for _, view in pairs]), num_bytes, beside=PRIVATE),
        ),
    )


def _in_turn(calls: Sequence[_Decode]) -> _Decode:
    turns = cycle(calls)

    def call() -> torch.Tensor:
        return next(turns)()

    return call


def _pair(
    heads: Heads, dtype: str, num_sequences: int, context: int, device: str, opened: ExitStack
) -> tuple[_Decode, _Decode]:
    """The same decode on a pool of this process's own, and through a view of a new daemon's."""
    layout, last = heads.layout(dtype), context - 1
    num_blocks = num_sequences * -(-context // layout.block_size)
    target = opened.enter_context(
        daemon_process(
            *("--storage", device, "--num-blocks", str(num_blocks), "--dtype", dtype),
            *("--num-layers", "1", "--num-kv-heads", str(layout.num_kv_heads)),
            *("--head-dim", str(layout.head_dim), "--block-size", str(layout.block_size)),
        )
    )
    view = opened.enter_context(attach(target))
    assert view.client is not None
    sequences = [
        view.client.sequence(range(context * number, context * (number + 1)))
        for number in range(num_sequences)
    ]
    pool = Pool(layout, heads.group, num_blocks, device)
    shared = view.layer(0)
    shared.keys.copy_(pool.cache.keys)
    shared.values.copy_(pool.cache.values)
    q, k, v = (
        pool.queries(num_sequences),
        pool.new_tokens(num_sequences),
        pool.new_tokens(num_sequences),
    )
    batch = make_batch(
        [sequence.block_ids for sequence in sequences],
        [last] * num_sequences,
        [1] * num_sequences,
        [0] * num_sequences,
        layout.block_size,
    )

    def on_private_memory() -> torch.Tensor:
        write_kv(pool.cache, k, v, batch.slot_mapping)
        return decode(q, pool.cache, batch, PLAIN_ATTENTION)

    def through_the_view() -> torch.Tensor:
        for sequence in sequences:
            sequence._state.computed[0] = last
        return view.decode(0, sequences, q, k, v)

    return on_private_memory, through_the_view
