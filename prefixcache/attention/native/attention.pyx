# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Attention on CPU: arguments become the structs of attention.h, and the GIL is let go."""

from array import array

from libc.stddef cimport ptrdiff_t
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memset

cdef extern from "attention.h" nogil:
    enum: MOST_FORMS
    ctypedef int element_type
    ctypedef struct stored_tensor:
        const char *data
        ptrdiff_t block_stride, head_stride, token_stride
        int size
        const float *scales
        ptrdiff_t scale_block_stride, scale_head_stride, scale_token_stride
    ctypedef struct shared_runs:
        int num_runs
        const int32_t *run_sequences
        const int32_t *run_starts
        const int32_t *run_ends
        const int32_t *run_first_queries
        const int32_t *run_end_queries
        const int32_t *query_tokens
        const int32_t *private_starts
    ctypedef struct attention_call:
        element_type q_type, stored_type
        const char *q
        ptrdiff_t q_token_stride, q_head_stride
        char *out
        stored_tensor keys, values
        int num_tokens, num_sequences, num_kv_heads, group, block_size
        const int32_t *block_tables
        ptrdiff_t table_stride
        const int32_t *query_start
        const int32_t *seq_lens
        shared_runs shared
        float scale
        int window
        float soft_cap
        const float *slopes
        const float *sinks
    ctypedef struct attention_form:
        const char *name
    element_type FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8
    int attention_forms(const attention_form **forms)
    int attention_run(
        const attention_call *call, const attention_form *form, int num_threads, int in_background
    )

cdef extern from "write_kv.h" nogil:
    ctypedef struct new_rows:
        const char *rows
        ptrdiff_t row_token_stride, row_head_stride
        char *stored
        ptrdiff_t block_stride, head_stride, token_stride
        size_t row_bytes
    ctypedef struct kv_write:
        new_rows tensors[2]
        int num_tokens, num_kv_heads, block_size
        const int64_t *slot_mapping
    void write_kv_run(const kv_write *write, int num_threads)

cdef const attention_form *_forms[MOST_FORMS]
cdef int _num_forms = attention_forms(_forms)
cdef dict _TYPES = {
    "float32": FLOAT32,
    "float16": FLOAT16,
    "bfloat16": BFLOAT16,
    "int8": INT8,
    "float8_e4m3fn": FLOAT8,
}

FORMS = tuple(_forms[index].name.decode() for index in range(_num_forms))
"""Instruction sets that this processor has a form for, best first."""


def attend(
    form,
    int num_threads,
    q,
    cache,
    out,
    const int32_t[:, :] block_tables,
    const int32_t[:] query_start,
    const int32_t[:] seq_lens,
    shared_prefix,
    options,
    bint in_background,
):
    """Attention of checked arguments into `out`, which is contiguous.

    form: one of `FORMS`. q: `[T, Hq, D]`, cache: a KVCache, out: `[T, Hq, Dv]` of q's dtype, T > 0;
    all tensors are in the CPU's memory, and their elements lie side by side. block_tables: rows
    contiguous; the other arrays are contiguous. shared_prefix: a SharedPrefix or None.
    in_background: threads of lower priority do it, if it takes more than about 1 ms.
    Raises MemoryError.
    """
    cdef attention_call call
    cdef const attention_form *chosen = _forms[FORMS.index(form)]
    cdef const float[::1] slopes, sinks
    cdef int result
    call.q_type, call.stored_type = _type_of(q), _type_of(cache.keys)
    call.q = <const char *><size_t>q.data_ptr()
    call.q_token_stride, call.q_head_stride = _byte_strides(q)[:2]
    call.out = <char *><size_t>out.data_ptr()
    scales = cache.scales
    call.keys = _stored(cache.keys, None if scales is None else scales.keys)
    call.values = _stored(cache.values, None if scales is None else scales.values)
    call.num_kv_heads, call.block_size = cache.keys.shape[1:3]
    call.num_tokens, call.group = q.shape[0], q.shape[1] // call.num_kv_heads
    call.num_sequences = seq_lens.shape[0]
    call.block_tables = &block_tables[0, 0]
    call.table_stride = block_tables.strides[0] // sizeof(int32_t)
    call.query_start, call.seq_lens = &query_start[0], &seq_lens[0]
    call.shared = _shared(shared_prefix)
    call.scale = options.scale_for(q.shape[2])
    call.window = INT32_MAX if options.window is None else min(options.window, INT32_MAX)
    call.soft_cap = 0 if options.soft_cap is None else options.soft_cap
    call.slopes = call.sinks = NULL
    if options.alibi_slopes:
        slopes = array("f", options.alibi_slopes)
        call.slopes = &slopes[0]
    if options.sinks:
        sinks = array("f", options.sinks)
        call.sinks = &sinks[0]
    with nogil:
        result = attention_run(&call, chosen, num_threads, in_background)
    if result != 0:
        raise MemoryError("attention")


def write(int num_threads, k, v, cache, const int64_t[:] slot_mapping):
    """Store checked rows in a cache of their own dtype, without scales.

    k: `[T, Hkv, D]`, v: `[T, Hkv, Dv]` or None; all tensors are in the CPU's memory, and their
    elements lie side by side. slot_mapping: `[T]`, contiguous; slots below 0 are skipped, none is
    there twice. T > 0.
    """
    cdef kv_write call
    memset(&call, 0, sizeof(call))
    call.num_kv_heads, call.block_size = cache.keys.shape[1:3]
    call.num_tokens = slot_mapping.shape[0]
    call.slot_mapping = &slot_mapping[0]
    call.tensors[0] = _new_rows(k, cache.keys)
    if v is not None:
        call.tensors[1] = _new_rows(v, cache.values)
    with nogil:
        write_kv_run(&call, num_threads)


cdef element_type _type_of(tensor) except *:
    return _TYPES[str(tensor.dtype).removeprefix("torch.")]


cdef list _byte_strides(tensor):
    size = tensor.element_size()
    return [stride * size for stride in tensor.stride()]


cdef new_rows _new_rows(rows, stored) except *:
    cdef new_rows copied
    copied.rows = <const char *><size_t>rows.data_ptr()
    copied.row_token_stride, copied.row_head_stride = _byte_strides(rows)[:2]
    copied.stored = <char *><size_t>stored.data_ptr()
    copied.block_stride, copied.head_stride, copied.token_stride = _byte_strides(stored)[:3]
    copied.row_bytes = stored.shape[3] * stored.element_size()
    return copied


cdef stored_tensor _stored(tensor, scales) except *:
    cdef stored_tensor stored
    stored.data = <const char *><size_t>tensor.data_ptr()
    strides = _byte_strides(tensor)
    stored.block_stride, stored.head_stride, stored.token_stride = strides[:3]
    stored.size = tensor.shape[3]
    stored.scales = NULL
    stored.scale_block_stride = stored.scale_head_stride = stored.scale_token_stride = 0
    if scales is not None:
        stored.scales = <const float *><size_t>scales.data_ptr()
        stored.scale_block_stride, stored.scale_head_stride, stored.scale_token_stride = (
            scales.stride()
        )
    return stored


cdef const int32_t *_ints(array):
    cdef const int32_t[::1] view = array
    return &view[0]


cdef shared_runs _shared(plan) except *:
    cdef shared_runs shared
    memset(&shared, 0, sizeof(shared))
    if plan is None:
        return shared
    shared.num_runs = len(plan.run_sequences)
    shared.run_sequences = _ints(plan.run_sequences)
    shared.run_starts = _ints(plan.run_starts)
    shared.run_ends = _ints(plan.run_ends)
    shared.run_first_queries = _ints(plan.run_first_queries)
    shared.run_end_queries = _ints(plan.run_end_queries)
    shared.query_tokens = _ints(plan.query_tokens)
    shared.private_starts = _ints(plan.private_starts)
    return shared
