/* What the forms for AVX-512 have in common. Included by a file that defines FORM and HAS_PAIRS. */

#include <immintrin.h>

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
