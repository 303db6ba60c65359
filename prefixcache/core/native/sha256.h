/* SHA-256 (FIPS 180-4), with the SHA instructions of x86-64 where the processor has them.
 *
 * Own code, no library. The instructions are chosen at run time, so the compiler needs no -march.
 * The caller pads in place: a message lies in a buffer with SHA256_PAD_BYTES to spare behind it.
 */
#ifndef PREFIXCACHE_SHA256_H
#define PREFIXCACHE_SHA256_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define SHA256_HAS_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define SHA256_HAS_X86 0
#endif

#define SHA256_PAD_BYTES 72

typedef void (*sha256_compress)(uint32_t state[8], const uint8_t *data, size_t num_chunks);

static const uint32_t sha256_initial[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static const uint32_t sha256_k[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t sha256_load_be(const uint8_t *bytes) {
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static inline void sha256_store_be(uint8_t *bytes, uint32_t word) {
    bytes[0] = (uint8_t)(word >> 24);
    bytes[1] = (uint8_t)(word >> 16);
    bytes[2] = (uint8_t)(word >> 8);
    bytes[3] = (uint8_t)word;
}

static inline uint32_t sha256_rotr(uint32_t word, int count) {
    return word >> count | word << (32 - count);
}

/* One round, with the eight words turned by one from round to round instead of moved. */
#define SHA256_ROUND(a, b, c, d, e, f, g, h, t)                                                \
    do {                                                                                       \
        h += (sha256_rotr(e, 6) ^ sha256_rotr(e, 11) ^ sha256_rotr(e, 25))                     \
             + (((f ^ g) & e) ^ g) + sha256_k[t] + w[t];                                       \
        d += h;                                                                                \
        h += (sha256_rotr(a, 2) ^ sha256_rotr(a, 13) ^ sha256_rotr(a, 22))                     \
             + ((a & b) | (c & (a | b)));                                                      \
    } while (0)

static void sha256_compress_portable(uint32_t state[8], const uint8_t *data, size_t num_chunks) {
    uint32_t w[64];
    for (; num_chunks; num_chunks--, data += 64) {
        for (int t = 0; t < 16; t++) w[t] = sha256_load_be(data + 4 * t);
        for (int t = 16; t < 64; t++) {
            uint32_t x = w[t - 15], y = w[t - 2];
            uint32_t s0 = sha256_rotr(x, 7) ^ sha256_rotr(x, 18) ^ x >> 3;
            uint32_t s1 = sha256_rotr(y, 17) ^ sha256_rotr(y, 19) ^ y >> 10;
            w[t] = w[t - 16] + s0 + w[t - 7] + s1;
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int t = 0; t < 64; t += 8) {
            SHA256_ROUND(a, b, c, d, e, f, g, h, t);
            SHA256_ROUND(h, a, b, c, d, e, f, g, t + 1);
            SHA256_ROUND(g, h, a, b, c, d, e, f, t + 2);
            SHA256_ROUND(f, g, h, a, b, c, d, e, t + 3);
            SHA256_ROUND(e, f, g, h, a, b, c, d, t + 4);
            SHA256_ROUND(d, e, f, g, h, a, b, c, t + 5);
            SHA256_ROUND(c, d, e, f, g, h, a, b, t + 6);
            SHA256_ROUND(b, c, d, e, f, g, h, a, t + 7);
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#if SHA256_HAS_X86
static int sha256_processor_has_sha(void) {
    unsigned int a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const unsigned int ssse3_and_sse41 = 1u << 9 | 1u << 19;
    if ((c & ssse3_and_sse41) != ssse3_and_sse41) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return b >> 29 & 1;
}

/* Four rounds on `now`, and the schedule: `now` becomes the words of sixteen rounds later. */
#define SHA256_ROUNDS(round, now)                                                              \
    do {                                                                                       \
        wk = _mm_add_epi32(now, _mm_load_si128((const __m128i *)(sha256_k + (round))));        \
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);                                          \
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));                 \
    } while (0)
#define SHA256_SCHEDULE(now, next, after, last)                                                \
    (now = _mm_sha256msg2_epu32(                                                               \
         _mm_add_epi32(_mm_sha256msg1_epu32(now, next), _mm_alignr_epi8(last, after, 4)), last))
#define SHA256_SIXTEEN_ROUNDS(round)                                                           \
    do {                                                                                       \
        SHA256_ROUNDS(round, m0);                                                              \
        SHA256_SCHEDULE(m0, m1, m2, m3);                                                       \
        SHA256_ROUNDS(round + 4, m1);                                                          \
        SHA256_SCHEDULE(m1, m2, m3, m0);                                                       \
        SHA256_ROUNDS(round + 8, m2);                                                          \
        SHA256_SCHEDULE(m2, m3, m0, m1);                                                       \
        SHA256_ROUNDS(round + 12, m3);                                                         \
        SHA256_SCHEDULE(m3, m0, m1, m2);                                                       \
    } while (0)

#define SHA256_CHUNK()                                                                         \
    do {                                                                                       \
        const __m128i abef_before = abef, cdgh_before = cdgh;                                  \
        __m128i wk;                                                                            \
        SHA256_SIXTEEN_ROUNDS(0);                                                              \
        SHA256_SIXTEEN_ROUNDS(16);                                                             \
        SHA256_SIXTEEN_ROUNDS(32);                                                             \
        SHA256_ROUNDS(48, m0);                                                                 \
        SHA256_ROUNDS(52, m1);                                                                 \
        SHA256_ROUNDS(56, m2);                                                                 \
        SHA256_ROUNDS(60, m3);                                                                 \
        abef = _mm_add_epi32(abef, abef_before);                                               \
        cdgh = _mm_add_epi32(cdgh, cdgh_before);                                               \
    } while (0)

__attribute__((target("sha,sse4.1,ssse3"))) static void
sha256_compress_x86(uint32_t state[8], const uint8_t *data, size_t num_chunks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    /* The instructions keep the state as two rows, a b e f and c d g h, highest word first. */
    __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(badc, efgh, 8), cdgh = _mm_blend_epi16(efgh, badc, 0xf0);
    for (; num_chunks; num_chunks--, data += 64) {
        const __m128i *words = (const __m128i *)data;
        __m128i m0 = _mm_shuffle_epi8(_mm_loadu_si128(words), swap);
        __m128i m1 = _mm_shuffle_epi8(_mm_loadu_si128(words + 1), swap);
        __m128i m2 = _mm_shuffle_epi8(_mm_loadu_si128(words + 2), swap);
        __m128i m3 = _mm_shuffle_epi8(_mm_loadu_si128(words + 3), swap);
        SHA256_CHUNK();
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

/* Digest of a padded message that begins with three bytes and the digest before, both of which are
   taken from `head` (its last three) and from `digest`, and not from memory: what was just stored
   there in other sizes would be waited for. The new digest takes the place of the old. */
#define SHA256_CHAINED_AT 3
__attribute__((target("sha,sse4.1,ssse3"))) static void
sha256_chained_x86(const uint8_t *message, size_t num_chunks, __m128i head, __m128i digest[2]) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    const __m128i tail = _mm_loadu_si128((const __m128i *)(message + SHA256_CHAINED_AT + 32));
    __m128i abef = _mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c);
    __m128i cdgh = _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19);
    __m128i m0 = _mm_shuffle_epi8(_mm_alignr_epi8(digest[0], head, 13), swap);
    __m128i m1 = _mm_shuffle_epi8(_mm_alignr_epi8(digest[1], digest[0], 13), swap);
    __m128i m2 = _mm_shuffle_epi8(_mm_alignr_epi8(tail, digest[1], 13), swap);
    __m128i m3 = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(message + 48)), swap);
    SHA256_CHUNK();
    while (--num_chunks) {
        const __m128i *words = (const __m128i *)(message += 64);
        m0 = _mm_shuffle_epi8(_mm_loadu_si128(words), swap);
        m1 = _mm_shuffle_epi8(_mm_loadu_si128(words + 1), swap);
        m2 = _mm_shuffle_epi8(_mm_loadu_si128(words + 2), swap);
        m3 = _mm_shuffle_epi8(_mm_loadu_si128(words + 3), swap);
        SHA256_CHUNK();
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    digest[0] = _mm_shuffle_epi8(_mm_blend_epi16(feba, dchg, 0xf0), swap);
    digest[1] = _mm_shuffle_epi8(_mm_alignr_epi8(dchg, feba, 8), swap);
}
#endif

/* The fastest form that this processor can run. */
static sha256_compress sha256_fastest(void) {
#if SHA256_HAS_X86
    if (sha256_processor_has_sha()) return sha256_compress_x86;
#endif
    return sha256_compress_portable;
}

/* Pad `message`, which has SHA256_PAD_BYTES writable bytes behind its `size`; returns its chunks. */
static inline size_t sha256_pad(uint8_t *message, size_t size) {
    size_t num_chunks = (size + 9 + 63) / 64, end = num_chunks * 64;
    uint64_t num_bits = (uint64_t)size * 8;
    message[size] = 0x80;
    memset(message + size + 1, 0, end - size - 9);
    sha256_store_be(message + end - 8, (uint32_t)(num_bits >> 32));
    sha256_store_be(message + end - 4, (uint32_t)num_bits);
    return num_chunks;
}

/* Digest of `message`, which has SHA256_PAD_BYTES writable bytes behind its `size`. */
static inline void
sha256_padded(sha256_compress compress, uint8_t *message, size_t size, uint8_t digest[32]) {
    uint32_t state[8];
    size_t num_chunks = sha256_pad(message, size);
    memcpy(state, sha256_initial, sizeof state);
    compress(state, message, num_chunks);
    for (int i = 0; i < 8; i++) sha256_store_be(digest + 4 * i, state[i]);
}

#endif
