"""The compiled kernels, each form of them that this processor runs, against float64."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from prefixcache.attention import decode as decode_module
from prefixcache.attention import native_attention as native_module
from prefixcache.attention import prefill as prefill_module
from prefixcache.attention.batch import PrefixSharing
from prefixcache.attention.device import native_forms, uses_native
from prefixcache.core.form import FORM_ENV
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions
from tests.attention.paged_cases import DTYPES, PagedCase, make_case, make_latent_case
from tests.attention.paths import NATIVE, Launcher
from tests.support.tolerances import assert_close

each_form = pytest.mark.parametrize("attend", NATIVE.values(), ids=NATIVE)
ALL_OPTIONS = AttentionOptions(
    0.2, window=90, soft_cap=3.0, alibi_slopes=(0.02, 0.0, 0.01, -0.01), sinks=(1.0, -5.0, 0.0, 2.0)
)


def run(attend: Launcher, case: PagedCase) -> torch.Tensor:
    return attend(case.q, case.cache, case.batch, case.options)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40)), max_size=3),
    group=st.integers(1, 16),
    head_dim=st.integers(1, 80) | st.sampled_from([96, 112, 128, 192, 256]),
    block_size=st.integers(1, 128),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_any_sizes_equal_float64(
    lengths: list[tuple[int, int]], seed: int, **dimensions: int
) -> None:
    """Rows, keys and elements that fill vectors, registers and tiles, and some that do not."""
    contexts, queries = [c for c, _ in lengths], [n for _, n in lengths]
    case = make_case(contexts, queries, num_kv_heads=1, seed=seed, **dimensions)
    exact = case.exact()
    for attend in NATIVE.values():
        assert_close(run(attend, case), exact)


@functools.cache
def many_rows(
    dtype: torch.dtype, options: AttentionOptions, stored: torch.dtype | None
) -> tuple[PagedCase, torch.Tensor]:
    """With its exact output, which takes long."""
    case = make_case([300, 700, 0], [70, 1, 130], dtype=dtype, options=options, stored=stored)
    return case, case.exact()


@each_form
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("options", [AttentionOptions(), ALL_OPTIONS], ids=["plain", "all"])
def test_many_rows_over_several_tiles_and_threads(
    attend: Launcher, options: AttentionOptions, stored: torch.dtype | None, num_threads: int
) -> None:
    """Contexts beyond a tile of keys, more new tokens than a segment has, segments cut in parts."""
    for dtype in DTYPES:
        case, exact = many_rows(dtype, options, stored)
        assert_close(run(attend, case), exact)


@each_form
def test_latents_of_many_heads(attend: Launcher, num_threads: int) -> None:
    for dtype in DTYPES:
        case = make_latent_case([600, 40], [1, 3], num_query_heads=24, dtype=dtype)
        assert_close(run(attend, case), case.exact())


@each_form
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("options", ["plain", "all but a window"])
def test_shared_blocks_are_read_once_and_the_parts_joined(
    attend: Launcher, options: str, group: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system prompt of five sequences, and a longer one of two of them."""
    weights = AttentionOptions()
    if options != "plain":
        slopes = tuple(0.01 * head for head in range(2 * group))
        weights = AttentionOptions(0.2, soft_cap=2.0, alibi_slopes=slopes, sinks=slopes)
    case = make_case(
        [100, 101, 130, 96, 40], [1, 2, 1, 3, 20], group=group, options=weights, block_size=8
    )
    tables = case.batch.block_tables.copy()
    tables[1:4, :8] = tables[0, :8]
    tables[1, :12] = tables[0, :12]
    sharing = replace(case.batch, block_tables=tables, prefix_sharing=PrefixSharing.ALWAYS)
    shared = replace(case, batch=sharing)
    plan = sharing.shared_prefix(8)
    assert plan is not None and len(plan.run_starts) == 2
    assert_close(run(attend, shared), shared.exact())


@pytest.fixture
def last_block_before_a_guard() -> Iterator[torch.Tensor]:
    """Two pages, of which the second may not be touched, as bytes."""
    page = mmap.PAGESIZE
    mapping = mmap.mmap(-1, 2 * page)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    guard = ctypes.c_void_p(whole.data_ptr() + page)
    assert libc.mprotect(guard, ctypes.c_size_t(page), 0) == 0
    yield whole[:page]
    assert libc.mprotect(guard, ctypes.c_size_t(page), 3) == 0  # readable and writable


@each_form
@pytest.mark.parametrize("head_dim", [5, 12, 20, 33])
@pytest.mark.parametrize("query_tokens", [1, 9])
def test_no_byte_after_the_last_token_is_read(
    attend: Launcher, query_tokens: int, head_dim: int, last_block_before_a_guard: torch.Tensor
) -> None:
    """The pool ends where the process may read no further."""
    for dtype in DTYPES:
        case = make_case([0], [9], num_kv_heads=1, group=4, head_dim=head_dim, dtype=dtype)
        case = replace(case, q=case.q[-query_tokens:])
        case = replace(
            case,
            batch=replace(
                case.batch,
                query_start=np.array([0, query_tokens], dtype=np.int32),
                context_lens=case.batch.seq_lens - query_tokens,
                block_tables=np.arange(3, dtype=np.int32)[None],
            ),
        )
        table = case.tables[0].tolist()
        numbers = torch.stack([case.cache.keys[table], case.cache.values[table]])
        end = last_block_before_a_guard.numel()
        pools = []
        for tensor in numbers:  # one at a time ends at the guard
            size = tensor.numel() * tensor.element_size()
            pool = last_block_before_a_guard[end - size :].view(dtype).view(tensor.shape)
            pools.append(pool.copy_(tensor))
            for cache in (KVCache(pool, numbers[1]), KVCache(numbers[0], pool)):
                placed = replace(case, cache=cache)
                if len(pools) == 1 + (cache.values is pool):
                    assert_close(run(attend, placed), placed.exact())


@each_form
def test_calls_of_many_threads_share_the_helpers(attend: Launcher, num_threads: int) -> None:
    cases = [make_case([200 + seed], [1 + seed], seed=seed) for seed in range(8)]
    exact = [case.exact() for case in cases]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            for out, expected in zip(
                threads.map(lambda c: run(attend, c), cases), exact, strict=True
            ):
                assert_close(out, expected)


@each_form
def test_the_output_is_the_same_however_the_work_is_taken(attend: Launcher) -> None:
    case = make_case([900, 300], [1, 40])
    outputs = []
    for _ in range(20):
        torch.set_num_threads(4)
        outputs.append(run(attend, case))
        torch.set_num_threads(1)
    assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_the_output_is_the_same_in_the_background(num_threads: int) -> None:
    """Of calls that are long enough to go there, and of one that is not, all at once."""
    cases = [make_case([900 + new], [new], seed=new) for new in (1, 800, 900)]
    attend = native_module.native_attention
    with ThreadPoolExecutor(len(cases)) as threads:
        for _ in range(3):
            outputs = list(
                threads.map(
                    lambda case: attend(
                        case.q, case.cache, case.batch, case.options, in_background=True
                    ),
                    cases,
                )
            )
            for case, out in zip(cases, outputs, strict=True):
                assert torch.equal(out, attend(case.q, case.cache, case.batch, case.options))


few_cores = pytest.mark.skipif(
    not 2 <= len(os.sched_getaffinity(0)) <= 16, reason="of one core, and of many, none is barred"
)


def printed_with_helpers(program: str, timeout_s: float) -> list[str]:
    """Words that a program prints, in a process of its own: its `case` is for two helpers.

    cores: those of the process. before: the threads that are no helpers.
    """
    begin = """
import os, time, torch
from tests.attention.paged_cases import make_case
from prefixcache.attention.native_attention import native_attention
torch.set_num_threads(3)
case = make_case([3000], [1])
cores, before = os.sched_getaffinity(0), set(os.listdir("/proc/self/task"))
"""
    done = subprocess.run(
        [sys.executable, "-c", begin + program],
        check=True,
        timeout=timeout_s,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


@few_cores
def test_helpers_run_on_all_cores_but_the_caller_s() -> None:
    """On one core with it they would take turns."""
    program = """
num_barred, end_s = [], time.monotonic() + 60
# A helper that has not begun yet is not known.
while num_barred != [1, 1] and time.monotonic() < end_s:
    native_attention(case.q, case.cache, case.batch, case.options)
    helpers = map(int, set(os.listdir("/proc/self/task")) - before)
    num_barred = [len(cores - os.sched_getaffinity(helper)) for helper in helpers]
print(*num_barred)
"""
    assert printed_with_helpers(program, 120) == ["1", "1"]


@few_cores
def test_a_caller_of_one_core_does_not_have_its_helpers_there() -> None:
    """Nor are they left with the cores of another caller that had few."""
    program = """
for core in [*sorted(cores), min(cores)]:
    end_s, found = time.monotonic() + 60, None
    while found != 2 * [cores - {core}] and time.monotonic() < end_s:
        native_attention(case.q, case.cache, case.batch, case.options)
        os.sched_setaffinity(0, {core})
        helpers = map(int, set(os.listdir("/proc/self/task")) - before)
        found = [os.sched_getaffinity(helper) for helper in helpers]
    print(found == 2 * [cores - {core}])
"""
    assert set(printed_with_helpers(program, 300)) == {"True"}


def test_a_forked_child_has_helpers_of_its_own() -> None:
    program = """
import os, torch
from tests.attention.paged_cases import make_case
from prefixcache.attention.native_attention import native_attention
torch.set_num_threads(3)
case = make_case([3000], [1])
arguments = case.q, case.cache, case.batch, case.options
before = native_attention(*arguments)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(native_attention(*arguments), before) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("module", [prefill_module, decode_module])
def test_launchers_run_compiled_code_where_elements_lie_side_by_side(
    module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = prefill_module.prefill if module is prefill_module else decode_module.decode
    calls = []
    monkeypatch.setattr(native_module, "native_attention", lambda *call, **_: calls.append(call))
    case = make_case([5], [1])
    run(launch, case)
    assert len(calls) == 1
    apart = case.with_caches(
        case.cache.keys.repeat_interleave(2, dim=3)[..., ::2], case.cache.values
    )
    assert not uses_native(apart.cache, apart.q)
    assert_close(run(launch, apart), case.exact())
    assert len(calls) == 1


@pytest.mark.parametrize(("wanted", "forms"), [("python", ()), ("native", native_forms())])
def test_the_environment_chooses_the_torch_path(wanted: str, forms: tuple[str, ...]) -> None:
    program = "from prefixcache.attention.device import native_forms; print(native_forms())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {FORM_ENV: wanted},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(forms)
