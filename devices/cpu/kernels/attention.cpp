// Attention over paged KV, read where it lies: softmax with a running maximum (FlashAttention, arXiv:2205.14135).
//
// A task is a few positions of one request times the query heads that share a KV head. Keys are taken in blocks of
// BLOCK positions that begin at multiples of BLOCK, so what a position gets does not depend on page size, on chunks
// or on what else is in the step. Products of a query with all keys of a block are made together, also with keys that
// some of the positions must not see; such a product is never used, and such a value is never read.

#include "numeric.h"
#include <algorithm>
#include <cmath>
#include <omp.h>
#include <type_traits>
#include <vector>

constexpr long BLOCK = 64;
constexpr long TASK_ROWS = 192;  // most queries of a task: their sums and scores stay in the second-level cache
constexpr long LEAST_ROWS = 48;  // a task is made this small when there would be few for a thread
constexpr long TASKS_OF_A_THREAD = 8;

struct Shape {
    long heads, kv_heads, dim, page_size, window;  // window 0: all
    float scale;
};

// Addresses of a block's positions in one head of the pages.
template <class T>
static void locate(const T *pages, const int32_t *table, const Shape &s, long head, long from, long to, const T **at) {
    long page = from / s.page_size, offset = from % s.page_size;
    for (long i = from; i < to; page++, offset = 0) {
        const T *first = pages + (table[page] * s.kv_heads + head) * s.page_size * s.dim;
        for (; i < to && offset < s.page_size; i++, offset++) at[i - from] = first + offset * s.dim;
    }
    for (long i = to - from; i < BLOCK; i++) at[i] = at[to - from - 1];  // a tile is always whole
}

// Scores of one query become weights, in place; `best` and `total` run along. Returns what older sums shrink to.
static float weigh(float *scores, long n, float &best, float &total) {
    float most = best;
#pragma omp simd reduction(max : most)
    for (long i = 0; i < n; i++) most = scores[i] > most ? scores[i] : most;
    float sum = 0, shrink = exp_of(best - most);
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++) sum += scores[i] = exp_of(scores[i] - most);
    best = most;
    total = total * shrink + sum;
    return shrink;
}

// sums[row] = shrink[row] * sums[row] + weights[row] * values, for ROWS queries that see the same values.
template <int ROWS, class T>
static void accumulate(float *sums, long stride, const float *shrink, const float *weights, const T *const *values,
                       long n, long dim) {
    for (long k = 0; k < dim; k += PAIR) {
        Pair sum[ROWS];
        for (int row = 0; row < ROWS; row++) {
            Pair old = load(sums + row * stride + k);
            sum[row] = {old.low * shrink[row], old.high * shrink[row]};
        }
        auto add = [&](auto value) {
            for (long i = 0; i < n; i++) {
                Pair v = value(values[i] + k);
                for (int row = 0; row < ROWS; row++) {
                    sum[row].low += v.low * weights[row * BLOCK + i];
                    sum[row].high += v.high * weights[row * BLOCK + i];
                }
            }
        };
        if (k + PAIR <= dim) add([](const T *p) { return load(p); });
        else add([=](const T *p) { return load_some(p, dim - k); });
        for (int row = 0; row < ROWS; row++) store(sums + row * stride + k, sum[row]);
    }
}

template <class T> struct Scratch {
    std::vector<float> memory;
    float *queries, *sums, *scores;
    std::vector<float> best, total, shrink;
    const T *keys[BLOCK], *next_keys[BLOCK], *values[BLOCK];

    Scratch(long rows, long stride)
        : memory(rows * (2 * stride + BLOCK) + ALIGN), best(rows), total(rows), shrink(rows) {
        queries = aligned(memory.data());
        sums = queries + rows * stride;
        scores = sums + rows * stride;
    }
};

// Queries of positions [first, last) of one request and one KV head; q and out point to the first one's first head.
template <class Q, class T>
static void task(const Q *q, long q_stride, Q *out, const T *k_pages, const T *v_pages, const int32_t *table,
                 const Shape &s, long kv_head, long first, long last, Scratch<T> &w) {
    long group = s.heads / s.kv_heads, stride = whole_pairs(s.dim), rows = (last - first) * group;
    for (long row = 0; row < rows; row++)
        arrange<T>(q + row / group * q_stride + row % group * s.dim, w.queries + row * stride, s.dim, s.scale);
    std::fill(w.sums, w.sums + rows * stride, 0.f);
    std::fill(w.best.begin(), w.best.end(), -INFINITY);
    std::fill(w.total.begin(), w.total.end(), 0.f);
    auto oldest = [&](long position) { return s.window ? std::max(0L, position + 1 - s.window) : 0L; };
    for (long from = oldest(first), to; from < last; from = to) {
        to = std::min(from / BLOCK * BLOCK + BLOCK, last);
        if (from == oldest(first)) locate(k_pages, table, s, kv_head, from, to, w.keys);
        else std::swap(w.keys, w.next_keys);
        locate(v_pages, table, s, kv_head, from, to, w.values);
        if (to < last) locate(k_pages, table, s, kv_head, to, std::min(to + BLOCK, last), w.next_keys);
        for (long i = 0; i < to - from; i += COLUMNS) {
            auto fetch = [&](long k) {
                for (int column = 0; column < COLUMNS; column++) {
                    __builtin_prefetch(w.values[i + column] + k);
                    if (to < last) __builtin_prefetch(w.next_keys[i + column] + k);
                }
            };
            tiles(w.queries, stride, rows, w.keys + i, s.dim, fetch,
                  [&](long row, Quad dots) { put(w.scores + row * BLOCK + i, dots); });
        }
        for (long position = std::max(first, from); position < last; position++) {
            long begin = std::max(from, oldest(position)) - from, n = std::min(to, position + 1) - from - begin;
            if (n <= 0) continue;
            for (long row = (position - first) * group; row < (position - first + 1) * group;) {
                long left = (position - first + 1) * group - row, many = std::min(left, 4L);
                float *weights = w.scores + row * BLOCK + begin;
                for (long i = row; i < row + many; i++)
                    w.shrink[i] = weigh(w.scores + i * BLOCK + begin, n, w.best[i], w.total[i]);
                auto with = [&](auto kernel) {
                    kernel(w.sums + row * stride, stride, &w.shrink[row], weights, w.values + begin, n, s.dim);
                };
                if (many == 4) with(accumulate<4, T>);
                else if (many == 3) with(accumulate<3, T>);
                else if (many == 2) with(accumulate<2, T>);
                else with(accumulate<1, T>);
                row += many;
            }
        }
    }
    for (long row = 0; row < rows; row++) {
        Q *to = out + (row / group * s.heads + row % group) * s.dim;
        restore<T>(w.sums + row * stride, to, s.dim, 1 / w.total[row]);
    }
}

#include "attention_pairs.h"

template <class Q, class T>
static void write(const Q *from, long stride, T *pages, const int64_t *slots, const Shape &s, long token) {
    long page = slots[token] / s.page_size, offset = slots[token] % s.page_size;
    for (long head = 0; head < s.kv_heads; head++) {
        const Q *x = from + token * stride + head * s.dim;
        T *to = pages + ((page * s.kv_heads + head) * s.page_size + offset) * s.dim;
        for (long i = 0; i < s.dim; i++) put(to[i], widen(x[i]));
    }
}

// See devices/cpu/attention.py, KernelAttention: strides are of tokens, in elements; starts is [batch + 1].
template <bool PAIRS, class Q, class T>
static void attention(const Q *q, long q_stride, const Q *k, long k_stride, const Q *v, long v_stride, Q *out,
                      T *k_pages, T *v_pages, const int32_t *tables, long table_stride, const int32_t *starts,
                      const int32_t *seq_lens, const int64_t *slots, long batch, const Shape &s, int threads) {
    struct Task {
        long request, first, last;
    };
    long group = s.heads / s.kv_heads, positions = std::max(1L, TASK_ROWS / group), tokens = starts[batch];
    while (positions * group > LEAST_ROWS && tokens / positions * s.kv_heads < TASKS_OF_A_THREAD * threads) positions /= 2;
    positions = std::max(1L, positions);
    std::vector<Task> tasks;
    for (long i = 0; i < batch; i++) {
        long past = seq_lens[i] - (starts[i + 1] - starts[i]);
        for (long first = past; first < seq_lens[i]; first += positions)
            tasks.push_back({i, first, std::min(first + positions, long(seq_lens[i]))});
    }
#pragma omp parallel num_threads(threads)
    {
        std::conditional_t<PAIRS, PairScratch, Scratch<T>> scratch(positions * group, PAIRS ? s.dim : whole_pairs(s.dim));
#pragma omp for schedule(static)
        for (long token = 0; token < tokens; token++) {
            if constexpr (PAIRS)
                if (is_laid_out(s)) {
                    write_laid_out(k + token * k_stride, v + token * v_stride, k_pages, v_pages, s, slots[token]);
                    continue;
                }
            write(k, k_stride, k_pages, slots, s, token);
            write(v, v_stride, v_pages, slots, s, token);
        }
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < long(tasks.size()) * s.kv_heads; i++) {
            Task t = tasks[i / s.kv_heads];
            long head = i % s.kv_heads, token = starts[t.request + 1] - seq_lens[t.request] + t.first;
            const Q *queries = q + token * q_stride + head * group * s.dim;
            Q *results = out + (token * s.heads + head * group) * s.dim;
            const int32_t *table = tables + t.request * table_stride;
            if constexpr (PAIRS)
                task_of_pairs(queries, q_stride, results, k_pages, v_pages, table, s, head, t.first, t.last, scratch);
            else task(queries, q_stride, results, k_pages, v_pages, table, s, head, t.first, t.last, scratch);
        }
    }
}

#define FOR_TYPES(NAME, PAIRS, Q, T)                                                                                          \
    void attention_##NAME(const Q *q, long qs, const Q *k, long ks, const Q *v, long vs, Q *out, T *kp, T *vp,         \
                          const int32_t *tables, long ts, const int32_t *starts, const int32_t *lens,                  \
                          const int64_t *slots, long batch, const Shape *shape, int threads) {                         \
        attention<PAIRS>(q, qs, k, ks, v, vs, out, kp, vp, tables, ts, starts, lens, slots, batch, *shape, threads);          \
    }

extern "C" {
FOR_TYPES(pairs, true, bf16, bf16)
FOR_TYPES(bf16_bf16, false, bf16, bf16)
FOR_TYPES(bf16_f32, false, bf16, float)
FOR_TYPES(f32_bf16, false, float, bf16)
FOR_TYPES(f32_f32, false, float, float)
}
