from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from transformers import PreTrainedModel

from prefixcache import Client
from prefixcache.attached import attach
from prefixcache.integrations.transformers import CachedModel


@pytest.fixture(params=["rpc", "attached"])
def cached_model(request: pytest.FixtureRequest) -> Iterator[Callable[..., CachedModel]]:
    """Makes a CachedModel, whose attention the daemon computes or an attached view does."""
    with ExitStack() as views:

        def make(model: PreTrainedModel, client: Client, **options: Any) -> CachedModel:
            if request.param == "rpc":
                return CachedModel(model, client, **options)
            view = views.enter_context(attach(client))
            return CachedModel(model, client, view=view, **options)

        yield make
