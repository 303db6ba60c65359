"""Whose a call is that has no thread yet.

A handler is told who calls, but has a thread by then; gRPC's interceptors run before that, and see
no certificate. So this looks into what grpcio submits to the threads, which is a matter of its own:
if that ever changes, calls are of no tenant while they wait, as without access control.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from grpc import _server

from prefixcache.core.tenants import NO_TENANT
from prefixcache.errors import PrefixCacheError
from prefixcache.server.access import Access

TenantOf = Callable[[tuple[Any, ...]], str]
"""From the arguments of a call that grpcio submits to its tenant; empty for none."""


def no_tenant(args: tuple[Any, ...]) -> str:
    """`TenantOf` of work that is no call, or of a daemon without tenants."""
    return NO_TENANT


def tenant_of_calls(access: Access) -> TenantOf:
    def tenant_of(args: tuple[Any, ...]) -> str:
        context = _context_of(args)
        if context is None:
            return NO_TENANT
        try:
            return access.caller(context, None).tenant
        except PrefixCacheError:  # the handler will say so
            return NO_TENANT

    return tenant_of


def _context_of(args: tuple[Any, ...]) -> grpc.ServicerContext | None:
    """args: a function, the call's event and its state, and what else the function takes."""
    try:
        _, event, state, *_ = args
        context: grpc.ServicerContext = _server._Context(event, state, None)
        context.invocation_metadata()
    except (AttributeError, TypeError, ValueError):
        return None
    return context
