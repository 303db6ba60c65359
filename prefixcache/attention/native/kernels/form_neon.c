/* 64-bit ARM; every processor of it has NEON. */

#include "attention.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#define FORM "neon"
#define LANES 4
#define STRIP 8
#define HAS_PAIRS 0
#include "form.h"

INLINE vec load_float16(const void *elements) {
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)elements)));
}

INLINE vec load_bfloat16(const void *elements) {
    return (vec)vshll_n_u16(vld1_u16((const uint16_t *)elements), 16);
}

/* Four bytes. */
INLINE uint8x8_t load_bytes(const void *bytes) {
    uint32_t four;
    memcpy(&four, bytes, sizeof four);
    return vreinterpret_u8_u32(vdup_n_u32(four));
}

INLINE vec load_int8(const void *elements) {
    int16x8_t halves = vmovl_s8(vreinterpret_s8_u8(load_bytes(elements)));
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves)));
}

INLINE half_vec load_widened(const void *bytes) {
    return (half_vec)vget_low_u16(vmovl_u8(load_bytes(bytes)));
}

INLINE half_vec to_float16(vec floats) {
    return (half_vec)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)floats));
}

const attention_form *attention_form_neon(void) { return &form; }

#else
const attention_form *attention_form_neon(void) { return NULL; }
#endif
