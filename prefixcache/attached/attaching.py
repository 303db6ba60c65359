"""The ways to a `PoolView`: for threads, and for asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prefixcache.client.aio import AsyncClient
from prefixcache.client.attachment import AttachTerms, request_attachment
from prefixcache.client.sync import Client

if TYPE_CHECKING:
    from prefixcache.attached.pool_view import PoolView


def attach(client: Client | str, *, writable: bool = True) -> PoolView:
    """Map the daemon's pool into this process, for sequences of the client.

    client: on a Unix socket and with a session, which is opened if there is none; or an address,
        for a client that the view makes, and closes with itself (`PoolView.client`).
    writable: whether K/V will be written. A view for reading can attend over what is cached, and
        look at blocks; the kernel lets it do no more.

    See `PoolView` for what holds then. Imports torch. Raises the errors of a client's calls,
    NoStorageError, AttachDeniedError, or InvalidArgumentError for a client that cannot be attached.
    """
    if not isinstance(client, str):
        return _map(client._connection.attach_terms(), writable)
    own = Client(client)
    try:
        return _map(own._connection.attach_terms(), writable, own)
    except BaseException:
        own.close()
        raise


async def attach_async(client: AsyncClient, *, writable: bool = True) -> PoolView:
    """`attach`, for an `AsyncClient`. The view's own calls compute, and hold up the event loop
    meanwhile: an engine runs them in a thread, as it does its model.
    """
    terms = await client._connection.attach_terms()
    return await asyncio.to_thread(_map, terms, writable)


def _map(terms: AttachTerms, writable: bool, own_client: Client | None = None) -> PoolView:
    from prefixcache.attached.pool_view import PoolView

    return PoolView(request_attachment(terms, writable=writable), own_client)
