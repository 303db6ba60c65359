from libc.stdint cimport int32_t, int64_t

cdef extern from "free_queue.h" nogil:
    ctypedef struct free_queue:
        int32_t *next
        int32_t *prev
        int32_t ends
        int64_t length
    void queue_fill(free_queue *queue)
    void queue_start(free_queue *queue)
    bint queue_has(const free_queue *queue, int32_t block)
    void queue_insert(free_queue *queue, int32_t block, int32_t after)
    void queue_push_tail(free_queue *queue, int32_t block)
    void queue_remove(free_queue *queue, int32_t block)
    void queue_peek(const free_queue *queue, int64_t count, int32_t *blocks)
    void queue_splice(free_queue *queue, free_queue *other)
    void queue_pop(free_queue *queue, int64_t count, int32_t *blocks)

cdef class FreeQueue:
    cdef free_queue queue
    cdef object _columns

    cdef void start(self, free_queue *other, Py_ssize_t number)
