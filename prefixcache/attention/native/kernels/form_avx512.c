/* x86-64 with AVX-512 (F, BW, DQ and VL): Intel servers since 2017, AMD since 2022. */

#include "attention.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include <immintrin.h>

#define FORM "avx512"
#define LANES 16
#define STRIP 12
#include "form.h"

INLINE vec load_float16(const void *elements) {
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)elements));
}

INLINE vec load_bfloat16(const void *elements) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)elements));
    return (vec)_mm512_slli_epi32(bits, 16);
}

INLINE vec load_int8(const void *elements) {
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)elements)));
}

INLINE half_vec load_widened(const void *bytes) {
    return (half_vec)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)bytes));
}

INLINE half_vec to_float16(vec floats) {
    return (half_vec)_mm512_cvtps_ph((__m512)floats, _MM_FROUND_TO_NEAREST_INT);
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC reset_options
#endif

const attention_form *attention_form_avx512(void) { return &form; }

#else
const attention_form *attention_form_avx512(void) { return NULL; }
#endif
