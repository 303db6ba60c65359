/* x86-64 with AVX2, FMA and F16C: Intel since 2013, AMD since 2015. */

#include "attention.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>

#define FORM "avx2"
#define LANES 8
#define STRIP 6
#define HAS_PAIRS 0
#include "form.h"

INLINE vec load_float16(const void *elements) {
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)elements));
}

INLINE vec load_bfloat16(const void *elements) {
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)elements));
    return (vec)_mm256_slli_epi32(bits, 16);
}

INLINE vec load_int8(const void *elements) {
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)elements)));
}

INLINE half_vec load_widened(const void *bytes) {
    return (half_vec)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)bytes));
}

INLINE half_vec to_float16(vec floats) {
    return (half_vec)_mm256_cvtps_ph((__m256)floats, _MM_FROUND_TO_NEAREST_INT);
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC reset_options
#endif

const attention_form *attention_form_avx2(void) { return &form; }

#else
const attention_form *attention_form_avx2(void) { return NULL; }
#endif
