/* x86-64 with AVX-512 (F, BW, DQ and VL): Intel servers since 2017, AMD since 2022. */

#include "attention.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define FORM "avx512"
#define HAS_PAIRS 0
#include "avx512.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC reset_options
#endif

const attention_form *attention_form_avx512(void) { return &form; }

#else
const attention_form *attention_form_avx512(void) { return NULL; }
#endif
