"""The pool of a daemon on a GPU, in this process and in another one: `make gpu`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from prefixcache import Client, attach, errors
from prefixcache.bench.children import daemon_process
from prefixcache.client import Sequence
from tests.attached.served import NUM_LAYERS, OPTIONS, Tensors

pytestmark = pytest.mark.gpu
LAYOUT = ("--num-layers", str(NUM_LAYERS), "--num-kv-heads", "2", "--head-dim", "64")


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with daemon_process(
        *("--storage", "cuda", "--num-blocks", "64", "--dtype", "bfloat16", *LAYOUT)
    ) as target:
        yield target


def steps(num_tokens: int, seed: int) -> list[Tensors]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(
            torch.randn(num_tokens, num_heads, 64, generator=generator).bfloat16().cuda()
            for num_heads in (4, 2, 2)
        )
        for _ in range(NUM_LAYERS)
    ]


def test_a_view_on_the_gpu_computes_what_the_daemon_does(target: str) -> None:
    with Client(target) as client, attach(client) as view:
        assert view.device.type == "cuda"
        here, there = client.sequence(range(50)), client.sequence(range(100, 150))
        for layer, (q, k, v) in enumerate(steps(50, 1)):
            out = view.prefill(layer, [here], [50], q, k, v, OPTIONS)
            assert torch.equal(out, there.prefill(layer, q, k, v, OPTIONS))
        here.commit(50)
        for sequence in (here, there):
            sequence.append([7])
        for layer, (q, k, v) in enumerate(steps(1, 2)):
            out = view.decode(layer, [here], q, k, v, OPTIONS)
            assert torch.equal(out, there.decode(layer, q, k, v, OPTIONS))
        for layer in range(NUM_LAYERS):
            cache = view.layer(layer)
            for side in (cache.keys, cache.values):
                ours, theirs = (side[one.block_ids.tolist()[:3]] for one in (here, there))
                assert torch.equal(ours, theirs)


READER = """
import sys
import torch
from prefixcache import Client, attach
from tests.attached.test_cuda_gpu import OPTIONS, steps

with Client(sys.argv[1]) as client, attach(client, writable=False) as view:
    hit, by_rpc = client.sequence(range(500, 532)), client.sequence(range(500, 532))
    assert hit.num_cached_tokens == 31
    for layer, (q, k, v) in enumerate(steps(1, 4)):
        out = view.decode(layer, [hit], q, k, v, OPTIONS)
        assert torch.equal(out, by_rpc.decode(layer, q, k, v, OPTIONS))
"""


def computed(client: Client, view: object, tokens: range) -> Sequence:
    sequence = client.sequence(tokens)
    for layer, (q, k, v) in enumerate(steps(len(tokens), 3)):
        view.prefill(layer, [sequence], [len(tokens)], q, k, v, OPTIONS)  # type: ignore[attr-defined]
    sequence.commit(len(tokens))
    return sequence


def test_what_one_process_commits_another_reads(target: str) -> None:
    with Client(target) as client, attach(client) as view:
        computed(client, view, range(500, 532))
        subprocess.run([sys.executable, "-c", READER, target], timeout=120, check=True)


def test_a_view_for_reading_writes_nothing(target: str) -> None:
    with Client(target) as client, attach(client, writable=False) as view:
        sequence = client.sequence(range(900, 910))
        with pytest.raises(errors.ReadOnlyViewError):
            view.prefill(0, [sequence], [10], *steps(10, 5)[0], OPTIONS)


def test_a_daemon_that_lets_processes_read_alone_gives_no_gpu_memory() -> None:
    """It could be written to: CUDA maps for both."""
    flags = ("--storage", "cuda", "--num-blocks", "8", "--dtype", "bfloat16", "--attach", "read")
    with (
        daemon_process(*flags, *LAYOUT) as target,
        Client(target) as client,
        pytest.raises(errors.AttachDeniedError),
    ):
        attach(client, writable=False)
