"""The daemon that a configuration describes: its memory, its limits, and torch as it is to run."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from prefixcache.config import ServeConfig
from prefixcache.core.sessions import SessionLimits
from prefixcache.errors import InvalidArgumentError
from prefixcache.server.daemon import CacheOptions, Daemon, LimitOptions, ModelOptions
from prefixcache.server.model_layout import layout_of
from prefixcache.server.recorder import Recorder
from prefixcache.storage.fixed_scales import FixedScales, read_scale_file
from prefixcache.storage.layout import Layout, num_blocks_for_memory

if TYPE_CHECKING:
    from prefixcache.server.tracing import Tracing


def make_daemon(
    config: ServeConfig, recorder: Recorder | None = None, tracing: Tracing | None = None
) -> Daemon:
    """The daemon that a configuration describes, with its memory allocated."""
    try:
        return _make_daemon(config, recorder, tracing)
    except InvalidArgumentError as error:
        if error.field != "num_blocks" or config.pool.num_blocks is not None:
            raise
        # The number came of a size in bytes.
        problem = error.message.removeprefix("num_blocks: ")
        raise InvalidArgumentError("--memory", problem) from error


def _make_daemon(config: ServeConfig, recorder: Recorder | None, tracing: Tracing | None) -> Daemon:
    if config.pool.storage != "none":
        prepare_torch(config.process.threads)
    model = _model_options(config)
    num_blocks = _num_blocks(config, model)
    seed = config.cache.hash_seed
    return Daemon(
        CacheOptions(
            num_blocks=num_blocks,
            block_size=config.pool.block_size,
            hash_algorithm=config.cache.hash_algorithm,
            hash_seed=seed.get_secret_value() if seed is not None else None,
            verify_hits=config.cache.verify_hits,
            prefix_caching=config.cache.prefix_caching,
            owner_ttl_s=config.cache.owner_ttl,
            event_buffer_bytes=config.events.buffer_bytes,
        ),
        model,
        LimitOptions(
            max_message_bytes=config.network.max_message_bytes,
            max_fork_children=config.cache.max_fork_children,
            max_tokens_per_call=config.limits.max_tokens_per_call,
            max_queued_calls=config.limits.max_queued_calls,
            max_queue_wait_s=config.limits.max_queue_wait,
            max_connections=config.limits.max_connections,
            max_wait_pending_s=config.limits.max_wait_pending,
            max_pending_waits=config.limits.max_pending_waits,
            max_arena_bytes=config.limits.max_arena,
            max_total_arena_bytes=config.limits.max_arenas,
            max_user_arena_bytes=(
                config.limits.arena_bytes_of_a_user
                if config.access.auth is None
                else config.limits.max_arenas
            ),
        ),
        SessionLimits(
            max_sessions=config.sessions.max_sessions,
            max_ttl_s=config.sessions.max_session_ttl,
            max_sequences=config.sessions.max_sequences,
            reconnect_grace_s=config.sessions.reconnect_grace,
            max_owners=config.limits.max_owners,
        ),
        on_allocated=None if recorder is None else recorder.add,
        around_kernels=nullcontext if tracing is None else tracing.attention,
    )


def prepare_torch(num_threads: int | None) -> None:
    """Import torch as the daemon uses it. num_threads: of one attention call; None: torch's own."""
    # Torch's idle threads spin. A sidecar shares its cores with engines, and two spinning teams
    # slow each other down many times; measured, sleeping costs an idle machine 10 ms a Decode of
    # 8 x 4,096 tokens. It must be in the environment before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _model_options(config: ServeConfig) -> ModelOptions:
    model, storage = config.model, config.pool.storage
    options = ModelOptions(name=model.model_name, revision=model.model_revision)
    if storage == "none":
        return options
    from prefixcache.attention.device import default_device

    device = default_device() if storage == "auto" else storage
    if device == "cuda" and default_device() != "cuda":
        raise InvalidArgumentError("--storage", "cuda is asked for, and torch sees no GPU here")
    layout = layout_of(model, config.pool.block_size)
    return replace(options, layout=layout, device=device, scales=_fixed_scales(config, layout))


def _fixed_scales(config: ServeConfig, layout: Layout) -> FixedScales | None:
    if config.model.kv_scales != "tensor":
        return None
    if config.model.kv_scale_file is None:
        return FixedScales.ones(layout.num_layers)
    return read_scale_file(config.model.kv_scale_file, layout.num_layers)


def _num_blocks(config: ServeConfig, model: ModelOptions) -> int:
    if config.pool.num_blocks is not None:
        return config.pool.num_blocks
    assert model.layout is not None  # `PoolSection` has checked: without storage it is given.
    free_gpu_bytes = None
    if model.device == "cuda":
        import torch

        free_gpu_bytes = torch.cuda.mem_get_info()[0]
    return num_blocks_for_memory(model.layout, config.pool.memory_bytes(free_gpu_bytes))
