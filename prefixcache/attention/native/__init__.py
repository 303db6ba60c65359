"""Attention on CPU in compiled code: one C source for every kind of vector, built with the package.

In `kernels/`, `attention.h` is the contract between the parts. A call is cut into segments
(`run.c`), which threads take one by one (`core/native/thread_pool.c`); a segment of few query rows
streams K/V as they lie (`few_rows.h`), one of many is two matrix products (`many_rows.h`). `form.h`
puts these together, and each `form_*.c` compiles them for one instruction set. `native_attention`
is the only caller. `write_kv.c` copies the K/V of new tokens, and the module `batch` makes and
checks the arrays of a call. Both modules are absent where no C compiler was at hand.
"""
