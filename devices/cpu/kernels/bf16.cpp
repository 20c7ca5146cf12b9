// y = x W^T + b in bf16 for processors that multiply pairs of bf16, any number of rows; fp32 sums. W lies in panels of
// WIDTH rows, and a word holds two columns of one row: words [panels][ins / 2][WIDTH]. A thread reads one stream, and a
// row of y depends on its row of x alone, to the last bit: each lane adds its columns in order.

#include "pairs.h"
#include <omp.h>

constexpr int VECTORS = 2, WIDTH = VECTORS * LANES;
#ifdef __AVX512F__
constexpr int TILE_ROWS = 8;
#else
constexpr int TILE_ROWS = 4;
#endif
constexpr long AHEAD = 4096;  // bytes that are fetched before they are needed

template <int ROWS, class Y>
static void strip(const bf16 *x, long x_stride, const uint32_t *panel, const bf16 *bias, Y *y, long y_stride, long row,
                  long rows, long pairs, long left) {
    for (; row + ROWS <= rows; row += ROWS) {
        Vec sum[ROWS][VECTORS] = {};
        const bf16 *in = x + row * x_stride;
        for (long k = 0; k < pairs; k++) {
            Bits w[VECTORS];
            for (int v = 0; v < VECTORS; v++) w[v] = *(const Bits *)(panel + k * WIDTH + v * LANES);
            if (row == 0)
                for (int v = 0; v < VECTORS; v++)
                    __builtin_prefetch((const char *)(panel + k * WIDTH + v * LANES) + AHEAD);
            for (int r = 0; r < ROWS; r++) {
                Bits word = Bits{} + word_at(in + r * x_stride + 2 * k);
                for (int v = 0; v < VECTORS; v++) sum[r][v] = dot(sum[r][v], w[v], word);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) {
                Y *to = y + (row + r) * y_stride + v * LANES;
                long count = left - v * LANES < LANES ? left - v * LANES : LANES;
                if (count == LANES && !bias) {
                    put(to, sum[r][v]);
                    continue;
                }
                for (long i = 0; i < count; i++) put(to[i], sum[r][v][i] + (bias ? widen(bias[v * LANES + i]) : 0));
            }
    }
    if constexpr (ROWS > 1)
        strip<ROWS / 2>(x, x_stride, panel, bias, y, y_stride, row, rows, pairs, left);
}

template <class Y>
static void linear(const bf16 *x, long x_stride, const uint32_t *weight, const bf16 *bias, Y *y, long rows, long outs,
                   long ins, int threads) {
    long panels = (outs + WIDTH - 1) / WIDTH, pairs = ins / 2;
    long part = panels / (4 * threads) + 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, part)
    for (long panel = 0; panel < panels; panel++) {
        long out = panel * WIDTH;
        strip<TILE_ROWS>(x, x_stride, weight + panel * pairs * WIDTH, bias ? bias + out : bias, y + out, outs, 0, rows,
                         pairs, outs - out);
    }
}

// out[i] = row ids[i] of the weight. The words of a row lie far apart, so that a thread waits for many at a time.
static void rows(const uint32_t *weight, const int64_t *ids, uint32_t *out, long count, long pairs, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 8)
    for (long i = 0; i < count; i++) {
        const uint32_t *from = weight + ids[i] / WIDTH * pairs * WIDTH + ids[i] % WIDTH;
        for (long k = 0; k < pairs; k++) out[i * pairs + k] = from[k * WIDTH];
    }
}

extern "C" {
extern const int bf16_width = WIDTH;
void bf16_rows(const uint32_t *weight, const int64_t *ids, uint32_t *out, long count, long pairs, int threads) {
    rows(weight, ids, out, count, pairs, threads);
}
void bf16_linear_bf16(const bf16 *x, long xs, const void *w, const bf16 *b, bf16 *y, long m, long n, long k, int t) {
    linear(x, xs, (const uint32_t *)w, b, y, m, n, k, t);
}
void bf16_linear_f32(const bf16 *x, long xs, const void *w, const bf16 *b, float *y, long m, long n, long k, int t) {
    linear(x, xs, (const uint32_t *)w, b, y, m, n, k, t);
}
}
