/* x86-64 with AVX-512 and its products of bfloat16: Intel servers since 2020, AMD since 2022. */

#include "attention.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#endif

#define FORM "avx512_bf16"
#define HAS_PAIRS 1
#include "avx512.h"

INLINE vec add_pairs(vec sum, const float *pair, vec column) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(*pair), (__m512bh)column);
}

INLINE vec to_pairs(vec first, vec second) {
    return (vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

INLINE void zip_pairs(const void *first, const void *second, vec zipped[2]) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)first));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)second));
    __m512i next_low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)first + 1));
    __m512i next_high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)second + 1));
    zipped[0] = (vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    zipped[1] = (vec)_mm512_or_si512(next_low, _mm512_slli_epi32(next_high, 16));
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC reset_options
#endif

const attention_form *attention_form_avx512_bf16(void) { return &form; }

#else
const attention_form *attention_form_avx512_bf16(void) { return NULL; }
#endif
