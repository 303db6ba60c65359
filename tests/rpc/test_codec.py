"""Replies that are written by hand, as protobuf would write them."""

from __future__ import annotations

import random

import pytest

from prefixcache.rpc import codec
from prefixcache.rpc._pb import attention_pb2
from prefixcache.types import HostTensor

DATA_TYPES = {
    "float32": attention_pb2.DATA_TYPE_FLOAT32,
    "float16": attention_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": attention_pb2.DATA_TYPE_BFLOAT16,
}


@pytest.mark.parametrize("num_bytes", [1, 2, 100, 110, 126, 127, 128, 16_370, 16_384, 2**21])
@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_a_tensor_reply_has_the_bytes_of_its_message(dtype: str, num_bytes: int) -> None:
    """Lengths of one byte, of two and of more, and between them those of the tensor around."""
    data, shape = random.Random(num_bytes).randbytes(num_bytes), (num_bytes, 300, 1)
    message = attention_pb2.PrefillResponse(
        out=attention_pb2.Tensor(data_type=DATA_TYPES[dtype], shape=shape, data=data)
    )
    for elements in (data, memoryview(data)):
        reply = codec.TensorReply(message.OUT_FIELD_NUMBER, HostTensor(dtype, shape, elements))
        assert reply.SerializeToString() == message.SerializeToString()
