/* Vectors of LANES floats: loads of every stored type, exp, tanh, sums and transposes.

   Written in the vector extensions of GCC and Clang, so that one source serves every instruction
   set. Included by a file that defines LANES and, with intrinsics, the loads that convert, which
   compilers make twice as many instructions of. */

#include <float.h>
#include <string.h>

#include "attention.h"

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t int_vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uint_vec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES)));

typedef float vec_in_memory __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

/* Of LANES elements at any address. Widened float8 numbers are halves of 16 bits. */
INLINE vec load_float16(const void *elements);
INLINE vec load_bfloat16(const void *elements);
INLINE vec load_int8(const void *elements);
INLINE half_vec load_widened(const void *bytes);
INLINE half_vec to_float16(vec floats);

/* Pairs: two bfloat16 numbers in each place of a vector, for forms that multiply such (HAS_PAIRS). */
#if HAS_PAIRS
/* sum + pair . column, in each place the sum of two products. */
INLINE vec add_pairs(vec sum, const float *pair, vec column);
/* 2 * LANES consecutive floats as bfloat16. */
INLINE vec to_pairs(vec first, vec second);
/* 2 * LANES bfloat16 numbers of each of two rows: those of a column become a pair. */
INLINE void zip_pairs(const void *first, const void *second, vec zipped[2]);
#else
INLINE vec add_pairs(vec sum, const float *pair, vec column) { return sum + *pair * column; }
INLINE vec to_pairs(vec first, vec second) { return first + second; }
INLINE void zip_pairs(const void *first, const void *second, vec zipped[2]) {
    (void)first, (void)second, (void)zipped;
}
#endif

INLINE int element_bytes(element_type type) {
    return type == FLOAT32 ? 4 : type == FLOAT16 || type == BFLOAT16 ? 2 : 1;
}

INLINE int padded(int size) { return (size + LANES - 1) / LANES * LANES; }

INLINE vec load_floats(const float *floats) { return *(const vec_in_memory *)floats; }

INLINE void store_floats(float *floats, vec v) { *(vec_in_memory *)floats = v; }

INLINE vec choose(int_vec mask, vec yes, vec no) {
    return (vec)((mask & (int_vec)yes) | (~mask & (int_vec)no));
}

INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

/* float8_e4m3fn: its exponent and mantissa at the place of a float16's are 2**-8 of the number.
   Only 0x7F is not a number, and there is no infinity. */
INLINE vec load_float8(const void *bytes) {
    half_vec h = load_widened(bytes);
    half_vec magnitude = h & 0x7F;
    half_vec halves = (h & 0x80) << 8 | magnitude << 7 | ((half_vec)(magnitude == 0x7F) & 0x7E00);
    return load_float16(&halves) * 256.0f;
}

/* LANES elements; `type` is a constant where this is used. */
INLINE vec load(const char *elements, element_type type) {
    if (type == FLOAT32) return load_floats((const float *)elements);
    if (type == FLOAT16) return load_float16(elements);
    if (type == FLOAT8) return load_float8(elements);
    if (type == INT8) return load_int8(elements);
    return load_bfloat16(elements);
}

/* Fewer than LANES elements, with zeros after them: what follows may be no memory, or no number. */
INLINE vec load_some(const char *elements, int count, element_type type) {
    char copy[4 * LANES] __attribute__((aligned(64))) = {0};
    memcpy(copy, elements, (size_t)(count * element_bytes(type)));
    return load(copy, type);
}

/* The vector that starts at `element` of a head of `size` elements. */
INLINE vec load_part(const char *head, int element, int size, element_type type) {
    const char *from = head + (ptrdiff_t)element * element_bytes(type);
    return element + LANES <= size ? load(from, type) : load_some(from, size - element, type);
}

static void store_head(char *out, const float *floats, int size, element_type type) {
    for (int d = 0; d < size; d += LANES) {
        vec v = load_floats(floats + d);
        size_t count = (size_t)(size - d < LANES ? size - d : LANES);
        if (type == FLOAT32) {
            memcpy(out + 4 * (size_t)d, &v, 4 * count);
            continue;
        }
        half_vec h;
        if (type == FLOAT16) {
            h = to_float16(v);
        } else { /* to the nearest bfloat16, ties to even; a NaN stays one */
            uint_vec bits = (uint_vec)v;
            uint_vec rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
            uint_vec is_nan = (uint_vec)(v != v);
            h = __builtin_convertvector((is_nan & 0x7FC0) | (~is_nan & rounded), half_vec);
        }
        memcpy(out + 2 * (size_t)d, &h, 2 * count);
    }
}

/* exp(x) for x <= 0, within 2e-7 of it; 0 below -87. NaN stays NaN. */
INLINE vec exp_negative(vec x) {
    const float to_integer = 12582912.0f; /* 1.5 * 2**23: what is added to it loses its fraction */
    vec y = x * 1.44269504f;
    vec shifted = y + to_integer;
    vec f = y - (shifted - to_integer);
    vec power = f * 1.5461448e-4f + 1.3390867e-3f;
    power = power * f + 9.618057e-3f;
    power = power * f + 5.5503570e-2f;
    power = power * f + 2.4022651e-1f;
    power = power * f + 6.9314718e-1f;
    power = power * f + 1.0f;
    vec scale = (vec)(((uint_vec)shifted << 23) + 0x3F800000);
    return choose(x < -87.0f, (vec){0}, power * scale);
}

INLINE vec tanh_any(vec x) {
    vec magnitude = (vec)((int_vec)x & 0x7FFFFFFF);
    vec square = x * x;
    vec near = square * 2.2958254e-3f + -8.3469637e-3f;
    near = near * square + 2.1769954e-2f;
    near = near * square + -5.3959403e-2f;
    near = near * square + 1.3333304e-1f;
    near = near * square + -3.3333334e-1f;
    near = x + x * square * near;
    vec faded = exp_negative(-2.0f * magnitude);
    vec far = (1.0f - faded) / (1.0f + faded);
    far = (vec)((int_vec)far | ((int_vec)x & INT32_MIN));
    return choose(magnitude < 0.625f, near, far);
}

/* Each vector is LANES / (2 * h) blocks of 2 * h elements. LOWER has the first half of a's block, of
   b's block, of a's next block and so on; UPPER has the second halves. */
#define LOWER(h, a, b) __builtin_shufflevector(a, b, LOWER_##h)
#define UPPER(h, a, b) __builtin_shufflevector(a, b, UPPER_##h)
#if LANES == 16
#define LOWER_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define UPPER_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOWER_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define UPPER_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOWER_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define UPPER_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOWER_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define UPPER_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define EACH_HALF(step) step(8) step(4) step(2) step(1)
#elif LANES == 8
#define LOWER_4 0, 1, 2, 3, 8, 9, 10, 11
#define UPPER_4 4, 5, 6, 7, 12, 13, 14, 15
#define LOWER_2 0, 1, 8, 9, 4, 5, 12, 13
#define UPPER_2 2, 3, 10, 11, 6, 7, 14, 15
#define LOWER_1 0, 8, 2, 10, 4, 12, 6, 14
#define UPPER_1 1, 9, 3, 11, 5, 13, 7, 15
#define EACH_HALF(step) step(4) step(2) step(1)
#else
#define LOWER_2 0, 1, 4, 5
#define UPPER_2 2, 3, 6, 7
#define LOWER_1 0, 4, 2, 6
#define UPPER_1 1, 5, 3, 7
#define EACH_HALF(step) step(2) step(1)
#endif

/* Element i of the result is the sum of vectors[i]. */
INLINE vec sums(vec vectors[LANES]) {
#define ADD_HALVES(h)               \
    _Pragma("GCC unroll 16")        \
    for (int i = 0; i < h; i++)     \
        vectors[i] = LOWER(h, vectors[i], vectors[i + h]) + UPPER(h, vectors[i], vectors[i + h]);
    EACH_HALF(ADD_HALVES)
#undef ADD_HALVES
    return vectors[0];
}

/* Rows become columns. */
INLINE void transpose(vec rows[LANES]) {
#define SWAP_QUARTERS(h)                             \
    _Pragma("GCC unroll 16")                         \
    for (int i = 0; i < LANES; i++)                  \
        if (!(i & h)) {                              \
            vec lower = LOWER(h, rows[i], rows[i + h]); \
            rows[i + h] = UPPER(h, rows[i], rows[i + h]); \
            rows[i] = lower;                         \
        }
    EACH_HALF(SWAP_QUARTERS)
#undef SWAP_QUARTERS
}

INLINE float sum_of(vec v) {
#define ADD_HALVES(h) v = LOWER(h, v, v) + UPPER(h, v, v);
    EACH_HALF(ADD_HALVES)
#undef ADD_HALVES
    return v[0];
}

INLINE float largest_of(vec v) {
#define LARGER_HALVES(h) v = larger(LOWER(h, v, v), UPPER(h, v, v));
    EACH_HALF(LARGER_HALVES)
#undef LARGER_HALVES
    return v[0];
}
