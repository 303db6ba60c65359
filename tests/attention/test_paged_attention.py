"""What the launcher of the kernel does before it launches; the kernel's tests are beside this."""

from __future__ import annotations

import subprocess
import sys

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from prefixcache.attention.device_batch import upload
from tests.attention.paged_cases import make_case


@settings(max_examples=30, deadline=None, derandomize=True)
@given(lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=9))
def test_a_batch_is_uploaded_whole_and_aligned(lengths: list[tuple[int, int]]) -> None:
    """Each array starts at 16 bytes: a kernel is compiled anew for a pointer that does not."""
    batch = make_case([c for c, _ in lengths], [n for _, n in lengths]).batch
    uploaded = upload(batch, torch.device("cpu"))
    for name in ("block_tables", "query_start", "seq_lens"):
        tensor, array = getattr(uploaded, name), getattr(batch, name)
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
        assert tensor.storage_offset() % 4 == 0


def test_importing_the_launcher_does_not_load_triton() -> None:
    program = "import prefixcache.attention.paged_attention, sys; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
