# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The order in which free blocks are reused, as a linked list; the steps are in free_queue.h.

Owns nothing but the order. The pool works on the list itself, which is `queue` for it; the methods
here are for whoever has arrays of blocks. Not thread-safe: the core's lock guards it.
"""

import numpy as np

from libc.stdint cimport int32_t


cdef class FreeQueue:
    """Block ids `0 ..< num_blocks`, at first all of them in that order.

    num_lists: how many lists there can be over the same columns, this one included.
    """

    def __init__(self, Py_ssize_t num_blocks, Py_ssize_t num_lists=1):
        cdef int32_t[:, ::1] columns
        self._columns = columns = np.empty((2, num_blocks + num_lists), dtype=np.int32)
        self.queue.next = &columns[0, 0]
        self.queue.prev = &columns[1, 0]
        self.queue.ends = num_blocks
        queue_fill(&self.queue)

    cdef void start(self, free_queue *other, Py_ssize_t number):
        """Make another, empty list of blocks that are in none; this one has number 0."""
        other.next, other.prev = self.queue.next, self.queue.prev
        other.ends = self.queue.ends + number
        queue_start(other)

    def __len__(self):
        return self.queue.length

    def __contains__(self, int32_t block_id):
        return queue_has(&self.queue, block_id)

    def push_tail(self, const int32_t[::1] block_ids):
        """Add blocks that are not in the queue; the last one becomes the tail."""
        cdef Py_ssize_t index
        for index in range(block_ids.shape[0]):
            queue_push_tail(&self.queue, block_ids[index])

    def push_head(self, const int32_t[::1] block_ids):
        """Add blocks that are not in the queue; the first one becomes the head."""
        cdef int32_t after = self.queue.ends
        cdef Py_ssize_t index
        for index in range(block_ids.shape[0]):
            queue_insert(&self.queue, block_ids[index], after)
            after = block_ids[index]

    def remove(self, const int32_t[::1] block_ids):
        """Take distinct blocks that are in the queue out of it, wherever they stand."""
        cdef Py_ssize_t index
        for index in range(block_ids.shape[0]):
            queue_remove(&self.queue, block_ids[index])

    def peek_head(self, Py_ssize_t count):
        """The first `count` blocks from the head on; `count` is at most the queue's length."""
        assert 0 <= count <= self.queue.length
        blocks = np.empty(count, dtype=np.int32)
        cdef int32_t[::1] view = blocks
        if count:
            queue_peek(&self.queue, count, &view[0])
        return blocks

    def pop_head(self, Py_ssize_t count):
        """Take the first `count` blocks; `count` is at most the queue's length."""
        assert 0 <= count <= self.queue.length
        blocks = np.empty(count, dtype=np.int32)
        cdef int32_t[::1] view = blocks
        if count:
            queue_pop(&self.queue, count, &view[0])
        return blocks

    def order(self):
        """All blocks from head to tail, `[len] int32`. For tests and inspection."""
        return self.peek_head(self.queue.length)
