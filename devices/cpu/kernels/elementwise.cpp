// What stands between two products of a layer: norms, the gate of an MLP, the rotation of queries and keys. All compute
// in fp32 and round once. Formulas: RMSNorm (arXiv:1910.07467), SwiGLU (arXiv:2002.05202), RoFormer (arXiv:2104.09864).

#include "numeric.h"
#include <cmath>
#include <omp.h>

constexpr long WORTH_A_THREAD = 16 * 1024;  // elements; below, waking other threads takes longer than the work

template <class T> static void norm_row(const T *x, const T *weight, T *out, long size, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < size; i++) squares += widen(x[i]) * widen(x[i]);
    float scale = 1 / std::sqrt(squares / size + eps);
#pragma omp simd
    for (long i = 0; i < size; i++) put(out[i], widen(x[i]) * scale * widen(weight[i]));
}

template <class T>
static void rms_norm(const T *x, const T *weight, T *out, long rows, long size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_A_THREAD)
    for (long row = 0; row < rows; row++) norm_row(x + row * size, weight, out + row * size, size, eps);
}

template <class T>
static void add_rms_norm(const T *x, const T *residual, const T *weight, T *out, T *sum, long rows, long size,
                         float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_A_THREAD)
    for (long row = 0; row < rows; row++) {
        const T *a = x + row * size, *b = residual + row * size;
        T *to = sum + row * size;
#pragma omp simd
        for (long i = 0; i < size; i++) put(to[i], widen(a[i]) + widen(b[i]));
        norm_row(to, weight, out + row * size, size, eps);
    }
}

template <class T> static void silu_mul(const T *gate_up, T *out, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > WORTH_A_THREAD)
    for (long row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
        T *to = out + row * size;
        auto gated = [](Vec x, Vec y) { return x / (1 + exp_of(-x)) * y; };
        long i = 0;
        for (; i + PAIR <= size; i += PAIR) {
            Pair x = load(gate + i), y = load(up + i);
            store(to + i, {gated(x.low, y.low), gated(x.high, y.high)});
        }
        for (; i < size; i++) {
            float x = widen(gate[i]);
            put(to[i], x / (1 + exp_of(-x)) * widen(up[i]));
        }
    }
}

// Pairs are (i, i + half); cos and sin are [tokens, half].
template <class T>
static void rotate(const T *x, long stride, const float *cos, const float *sin, T *out, long tokens, long heads,
                   long half, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * half > WORTH_A_THREAD)
    for (long token = 0; token < tokens; token++) {
        const float *c = cos + token * half, *s = sin + token * half;
        for (long head = 0; head < heads; head++) {
            const T *low = x + token * stride + head * 2 * half, *high = low + half;
            T *to = out + (token * heads + head) * 2 * half;
#pragma omp simd
            for (long i = 0; i < half; i++) {
                put(to[i], widen(low[i]) * c[i] - widen(high[i]) * s[i]);
                put(to[i + half], widen(high[i]) * c[i] + widen(low[i]) * s[i]);
            }
        }
    }
}

#define FOR_TYPE(NAME, T)                                                                                              \
    void rms_norm_##NAME(const T *x, const T *w, T *out, long rows, long size, float eps, int threads) {               \
        rms_norm(x, w, out, rows, size, eps, threads);                                                                 \
    }                                                                                                                  \
    void add_rms_norm_##NAME(const T *x, const T *r, const T *w, T *out, T *sum, long rows, long size, float eps,      \
                             int threads) {                                                                            \
        add_rms_norm(x, r, w, out, sum, rows, size, eps, threads);                                                     \
    }                                                                                                                  \
    void silu_mul_##NAME(const T *x, T *out, long rows, long size, int threads) {                                      \
        silu_mul(x, out, rows, size, threads);                                                                         \
    }                                                                                                                  \
    void rotate_##NAME(const T *x, long stride, const float *cos, const float *sin, T *out, long tokens, long heads,   \
                       long half, int threads) {                                                                       \
        rotate(x, stride, cos, sin, out, tokens, heads, half, threads);                                                \
    }

extern "C" {
FOR_TYPE(bf16, bf16)
FOR_TYPE(f32, float)
}
