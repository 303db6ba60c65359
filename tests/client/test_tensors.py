"""Tensors: the same kind comes back, bit for bit; nothing is cast."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixcache.client.tensors import like, to_host
from prefixcache.errors import InvalidArgumentError
from tests.client.fake_daemon import allocated

SHAPE = (5, 3, 8)


def _values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def _tensors():
    values = _values()
    yield "numpy-float32", values
    yield "numpy-float16", values.astype(np.float16)
    yield "numpy-big-endian", values.astype(">f4")
    yield "numpy-strided", np.repeat(values, 2, axis=2)[:, :, ::2]
    yield "numpy-transposed", np.ascontiguousarray(values.transpose(1, 0, 2)).transpose(1, 0, 2)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield f"{dtype}", torch.from_numpy(values).to(dtype)
    strided = torch.from_numpy(values).transpose(0, 1).contiguous().transpose(0, 1)
    yield "torch-transposed", strided
    yield "torch-bfloat16-transposed", strided.to(torch.bfloat16)
    yield "torch-grad", torch.from_numpy(values).requires_grad_()
    yield "torch-parameter", torch.nn.Parameter(torch.from_numpy(values))


@pytest.mark.parametrize("tensor", [pytest.param(t, id=name) for name, t in _tensors()])
def test_a_tensor_comes_back_as_the_same_kind(tensor):
    host = to_host(tensor, "q")
    back = like(tensor, host)
    assert host.shape == SHAPE
    assert len(host.data) == np.prod(SHAPE) * (4 if host.dtype == "float32" else 2)
    if isinstance(tensor, np.ndarray):
        assert isinstance(back, np.ndarray)
        assert back.dtype == tensor.dtype.newbyteorder("=")
        np.testing.assert_array_equal(back, tensor)
        back += 1
    else:
        assert type(back) is torch.Tensor
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor.detach())
        back += 1


def test_bytes_are_row_major_and_little_endian():
    values = np.array([[[1.0, 2.0]], [[3.0, 4.0]]], dtype=">f2")
    assert to_host(values, "q").data == bytes.fromhex("003c 0040 0042 0044")
    assert to_host(torch.tensor([1.0, -2.0]).bfloat16(), "q").data == bytes.fromhex("803f 00c0")


@pytest.mark.parametrize(
    "tensor",
    [
        [[[1.0]]],
        1.0,
        None,
        np.zeros(SHAPE),
        np.zeros(SHAPE, dtype=np.int32),
        torch.zeros(SHAPE, dtype=torch.float64),
        torch.zeros(SHAPE, dtype=torch.int8),
    ],
    ids=lambda tensor: f"{type(tensor).__name__}-{getattr(tensor, 'dtype', '')}",
)
def test_another_kind_or_dtype_is_refused_and_the_field_named(tensor):
    with pytest.raises(InvalidArgumentError) as caught:
        to_host(tensor, "k")
    assert caught.value.field.partition(".")[0] == "k"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_call_sends_and_returns_torch_tensors(client, fake, dtype):
    fake.will("Allocate", allocated(blocks=(0, 1)))
    q, k, v = (torch.randn(5, heads, 8).to(dtype) for heads in (4, 2, 2))
    with client.sequence([1, 2, 3, 4, 5]) as sequence:
        out = sequence.prefill(1, q, k, v, 0.5)
    assert torch.equal(out, q)
    assert out.dtype == dtype
    (request,) = fake.requests["Prefill"]
    assert request.batch.layer == 1
    assert request.batch.scale == 0.5
    for tensor, message in ((q, request.q), (k, request.k), (v, request.v)):
        assert list(message.shape) == list(tensor.shape)
        assert message.data == tensor.view(torch.uint8).numpy().tobytes()
