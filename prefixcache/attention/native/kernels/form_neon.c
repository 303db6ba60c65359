/* 64-bit ARM; every processor of it has NEON. */

#include "attention.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#define FORM "neon"
#define LANES 4
#define STRIP 8
#include "form.h"

INLINE vec load_float16(const void *halves) {
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)halves)));
}

INLINE half_vec to_float16(vec floats) {
    return (half_vec)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)floats));
}

const attention_form *attention_form_neon(void) { return &form; }

#else
const attention_form *attention_form_neon(void) { return NULL; }
#endif
