"""Tensors: the same kind comes back, bit for bit; nothing is cast."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixcache.client.tensors import host_view, like
from prefixcache.errors import InvalidArgumentError
from prefixcache.types import AttentionOptions, HostTensor
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
    view = host_view(tensor, "q")
    memory = np.full(view.num_bytes, 0xFF, np.uint8)
    view.copy_to(memory)
    assert memory.tobytes() == view.to_bytes()
    assert view.shape == SHAPE
    assert view.num_bytes == np.prod(SHAPE) * (4 if view.dtype == "float32" else 2)
    back = like(tensor, HostTensor(view.dtype, view.shape, memory.data))
    memory[:] = 0xFF
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
    assert host_view(values, "q").to_bytes() == bytes.fromhex("003c 0040 0042 0044")
    assert host_view(torch.tensor([1.0, -2.0]).bfloat16(), "q").to_bytes() == bytes.fromhex(
        "803f 00c0"
    )


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
        host_view(tensor, "k")
    assert caught.value.field.partition(".")[0] == "k"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_call_sends_and_returns_torch_tensors(client, fake, dtype):
    fake.will("Allocate", allocated(blocks=(0, 1)))
    q, k, v = (torch.randn(5, heads, 8).to(dtype) for heads in (4, 2, 2))
    with client.sequence([1, 2, 3, 4, 5]) as sequence:
        out = sequence.prefill(1, q, k, v, AttentionOptions(scale=0.5))
    assert torch.equal(out, q)
    assert out.dtype == dtype
    (request,) = fake.requests["Prefill"]
    assert request.batch.layer == 1
    assert request.batch.scale == 0.5
    for tensor, message in ((q, request.q), (k, request.k), (v, request.v)):
        assert list(message.shape) == list(tensor.shape)
        assert message.data == tensor.view(torch.uint8).numpy().tobytes()


def test_a_call_on_latents_sends_no_v(client, fake):
    fake.will("Allocate", allocated(blocks=(0, 1)))
    q, k = torch.randn(2, 4, 8), torch.randn(2, 1, 8)
    options = AttentionOptions(scale=0.25)
    with client.sequence([1, 2, 3, 4, 5]) as sequence:
        sequence.prefill(0, q, k, None, options)
        sequence.decode(0, q, k, None, options)
        client.prefill(0, [sequence], [1], q[:1], k[:1], None, options)
        client.decode(1, [sequence], q[:1], k[:1], None, options)
    requests = [*fake.requests["Prefill"], *fake.requests["Decode"]]
    assert len(requests) == 4
    for request in requests:
        assert request.HasField("k") and not request.HasField("v")


def test_the_options_of_a_call_are_sent_and_absent_ones_are_not(client, fake):
    fake.will("Allocate", allocated(blocks=(0, 1)))
    q = torch.randn(1, 2, 8)
    options = AttentionOptions(
        scale=0.5, window=3, soft_cap=30.0, alibi_slopes=(0.5, 0.25), sinks=(-1.0, 2.0)
    )
    with client.sequence([1, 2, 3, 4, 5]) as sequence:
        sequence.prefill(0, q, q, q)
        for call in (sequence.prefill, sequence.decode):
            call(0, q, q, q, options)
    (plain, full), (decode,) = fake.requests["Prefill"], fake.requests["Decode"]
    absent = ("scale", "window", "soft_cap")
    assert not any(plain.batch.HasField(name) for name in absent)
    assert not plain.batch.alibi_slopes and not plain.batch.sinks
    for batch in (full.batch, decode.batch):
        assert (batch.scale, batch.window, batch.soft_cap) == (0.5, 3, 30.0)
        assert list(batch.alibi_slopes) == [0.5, 0.25]
        assert list(batch.sinks) == [-1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (AttentionOptions(scale="1"), "scale"),
        (AttentionOptions(window=-1), "window"),
        (AttentionOptions(window=2**32), "window"),
        (AttentionOptions(window=1.5), "window"),
        (AttentionOptions(soft_cap=[1.0]), "soft_cap"),
        (AttentionOptions(alibi_slopes=(None,)), "alibi_slopes"),
        (AttentionOptions(sinks=("a",)), "sinks"),
        (AttentionOptions(sinks=2.0), "sinks"),
        (AttentionOptions(alibi_slopes=np.ones((2, 2))), "alibi_slopes"),
    ],
)
def test_options_that_cannot_be_sent_are_refused_by_name(client, fake, options, field):
    fake.will("Allocate", allocated(blocks=(0, 1)))
    q = torch.randn(1, 2, 8)
    sequence = client.sequence([1, 2, 3, 4, 5])
    with pytest.raises(InvalidArgumentError) as caught:
        sequence.prefill(0, q, q, q, options)
    assert caught.value.field == field
    assert not fake.requests["Prefill"]


def test_slopes_and_sinks_may_be_any_sequence_of_numbers(client, fake):
    fake.will("Allocate", allocated(blocks=(0, 1)))
    q = torch.randn(1, 2, 8)
    options = AttentionOptions(alibi_slopes=[0.5, 1], sinks=np.array([1.5, -2], np.float32))
    with client.sequence([1, 2, 3, 4, 5]) as sequence:
        sequence.prefill(0, q, q, q, options)
    (request,) = fake.requests["Prefill"]
    assert list(request.batch.alibi_slopes) == [0.5, 1.0]
    assert list(request.batch.sinks) == [1.5, -2.0]
