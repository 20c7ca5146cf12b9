// Products of pairs of bf16: a word holds two neighbours, the first in its low half.

#pragma once
#include "numeric.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// sum + low * low + high * high of each word, in fp32.
static inline Vec dot(Vec sum, Bits w, Bits x) {
#ifdef __AVX512BF16__
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
    sum += (Vec)(w & 0xffff0000u) * (Vec)(x & 0xffff0000u);
    return sum + (Vec)(w << 16) * (Vec)(x << 16);
#endif
}

static inline uint32_t word_at(const bf16 *p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// One step of a transposition: blocks of SIZE lanes off the diagonal change places.
template <int SIZE> static inline void exchange(Bits *rows) {
    Bits lane, from_first, from_second;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    Bits is_upper = (Bits)((lane & SIZE) != 0);
    from_first = is_upper ? lane - SIZE + LANES : lane;
    from_second = is_upper ? lane + LANES : lane + SIZE;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & SIZE) continue;
        Bits a = rows[i], b = rows[i + SIZE];
        rows[i] = __builtin_shuffle(a, b, from_first);
        rows[i + SIZE] = __builtin_shuffle(a, b, from_second);
    }
    if constexpr (2 * SIZE < LANES) exchange<2 * SIZE>(rows);
}

// rows[i] lane j <-> rows[j] lane i
static inline void transpose(Bits *rows) { exchange<1>(rows); }
