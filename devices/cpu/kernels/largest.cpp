// The largest number of each row and its first place: what a greedy request is given. See `Operators.largest`.

#include "numeric.h"
#include <cmath>

constexpr long CHUNK = 1024;  // numbers that are read again, from the first-level cache, when one of them is the largest

static float largest_of(const float *x, long size) {
    Vec most[4] = {Vec{} - INFINITY, Vec{} - INFINITY, Vec{} - INFINITY, Vec{} - INFINITY}, poison = {};
    long i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int v = 0; v < 4; v++) {
            Vec next = *(const Vec *)(x + i + v * LANES);
            most[v] = next > most[v] ? next : most[v];
            poison = next == next ? poison : next;
        }
    float best = -INFINITY;
    for (int v = 0; v < 4; v++)
        for (int lane = 0; lane < LANES; lane++) best = most[v][lane] > best ? most[v][lane] : best;
    for (; i < size; i++) best = x[i] > best || x[i] != x[i] ? x[i] : best;
    for (int lane = 0; lane < LANES; lane++)
        if (poison[lane] != poison[lane]) return poison[lane];
    return best;
}

extern "C" {
// Rows are `stride` apart; NaN is larger than everything.
void largest_f32(const float *x, long stride, float *best, int64_t *place, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        const float *in = x + row * stride;
        float most = in[0];
        long from = 0;
        for (long start = 0; start < size && most == most; start += CHUNK) {
            float next = largest_of(in + start, size - start < CHUNK ? size - start : CHUNK);
            if (next > most || next != next) most = next, from = start;
        }
        while (most == most ? in[from] != most : in[from] == in[from]) from++;
        best[row] = most, place[row] = from;
    }
}
}
