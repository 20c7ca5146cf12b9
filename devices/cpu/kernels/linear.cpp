// y = x W^T + b for few rows of x. W is as model files have it, [out, in], and is read once for a block of rows: with
// one row that is all the time there is. See numeric.h.

#include "numeric.h"
#include <omp.h>
#include <memory>

constexpr long CACHED_FLOATS = 64 * 1024;  // rows of x that all parts of the weight are multiplied with in turn

template <class T, class Y>
static void linear(const T *x, long x_stride, const T *weight, const T *bias, Y *y, long rows, long outs, long ins,
                   int threads) {
    long stride = whole_pairs(ins);
    std::unique_ptr<float[]> staging(new float[rows * stride + ALIGN]);
    float *staged = aligned(staging.get());
    long block = CACHED_FLOATS / stride / MAX_ROWS * MAX_ROWS;
    if (block < MAX_ROWS) block = MAX_ROWS;
    long part = outs / COLUMNS / (4 * threads) + 1;  // long runs of the weight, and yet some to give to an idle thread
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++) arrange<T>(x + row * x_stride, staged + row * stride, ins);
        for (long first = 0; first < rows; first += block) {
            long count = rows - first < block ? rows - first : block;
#pragma omp for schedule(dynamic, part) nowait
            for (long out = 0; out < outs; out += COLUMNS) {
                long left = outs - out;
                const T *w[COLUMNS];
                Quad added = {};
                for (int i = 0; i < COLUMNS; i++) {
                    long at = out + (i < left ? i : left - 1);
                    w[i] = weight + at * ins;
                    if (bias) added[i] = widen(bias[at]);
                }
                auto fetch = [&](long k) {
                    const char *next = (const char *)(w[0] + COLUMNS * (ins + k));
                    for (unsigned byte = 0; byte < COLUMNS * PAIR * sizeof(T); byte += 64) __builtin_prefetch(next + byte);
                };
                tiles(staged + first * stride, stride, count, w, ins, fetch, [&](long row, Quad dots) {
                    Y *to = y + (first + row) * outs + out;
                    dots += added;
                    if (left >= COLUMNS) put(to, dots);
                    else for (int i = 0; i < left; i++) put(to[i], dots[i]);
                });
            }
        }
    }
}

extern "C" {
void linear_bf16_bf16(const bf16 *x, long xs, const bf16 *w, const bf16 *b, bf16 *y, long m, long n, long k, int t) {
    linear(x, xs, w, b, y, m, n, k, t);
}
void linear_bf16_f32(const bf16 *x, long xs, const bf16 *w, const bf16 *b, float *y, long m, long n, long k, int t) {
    linear(x, xs, w, b, y, m, n, k, t);
}
void linear_f32_f32(const float *x, long xs, const float *w, const float *b, float *y, long m, long n, long k, int t) {
    linear(x, xs, w, b, y, m, n, k, t);
}
}
