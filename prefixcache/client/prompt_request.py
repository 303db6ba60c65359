"""Requests with a prompt, whose tokens are copied once on their way to gRPC.

Set in a message they are copied into it, and again as that is serialised; half a megabyte of a long
prompt each time, in memory that is new to the process. The fields of a message may stand in any
order, so the tokens are put behind all others here. Any server reads the same message.
"""

from __future__ import annotations

import numpy as np

from prefixcache.rpc.wire import column32, length_prefix, twin
from prefixcache.types import TokenIds

_ELEMENT = np.dtype("<u4")
"""Of the column on the wire."""


class PromptRequest:
    """What takes the place of a twin message that has `token_ids`.

    message: its name. token_ids: `[n] uint32`, not copied until it is serialised: nobody changes
    them before. fields: the others.
    """

    __slots__ = ("_fields", "_token_ids")

    def __init__(self, message: str, token_ids: TokenIds, **fields: object) -> None:
        self._fields = twin(message)(**fields)
        self._token_ids = token_ids

    @property
    def owner(self) -> bytes:
        owner: bytes = self._fields.owner
        return owner

    @owner.setter
    def owner(self, owner: bytes) -> None:
        self._fields.owner = owner

    @property
    def order(self) -> object:
        """The message of that field, to be filled."""
        return self._fields.order

    def SerializeToString(self) -> bytes:
        data: bytes = self._fields.SerializeToString()
        if not len(self._token_ids):
            return data
        tokens = np.ascontiguousarray(self._token_ids, _ELEMENT)
        prefix = length_prefix(self._fields.TOKEN_IDS_FIELD_NUMBER, tokens.nbytes)
        return b"".join((data, prefix, tokens.data))

    def whole(self) -> object:
        """The twin message, with a copy of the tokens."""
        whole = type(self._fields)()
        whole.CopyFrom(self._fields)
        whole.token_ids = column32(self._token_ids)
        return whole
