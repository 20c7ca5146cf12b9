// A task of attention for queries, keys and values in bf16 on processors that multiply pairs of it; see attention.cpp.
//
// A block's keys are turned so that a lane is a position, its values so that a word holds two positions of a column:
//
//     keys    words [dim / 2][BLOCK]                 a query's word times one load: BLOCK scores, nothing is folded
//     values  words [dim / PAIR][BLOCK / 2][2][LANES]    even columns, odd columns; a query's two weights times one load
//
// Both are zero where the task must not read, so a weight of zero there is harmless. Scores are fp32; weights are rounded
// to bf16 for the product with the values.

#pragma once
#include "pairs.h"

struct PairScratch {
    long dim, columns, words;
    std::vector<float> memory;
    std::vector<float> best, total, shrink;
    uint32_t *keys, *values;
    float *sums, *scores;
    bf16 *weights;
    const bf16 *at[2 * BLOCK], *next[2 * BLOCK];

    PairScratch(long rows, long dim)
        : dim(dim), columns(whole_pairs(dim)), words(whole_pairs(dim) / 2),
          memory(words * BLOCK + columns * BLOCK / 2 + rows * (columns + BLOCK + BLOCK / 2) + ALIGN), best(rows),
          total(rows), shrink(rows) {
        keys = (uint32_t *)aligned(memory.data());
        values = keys + words * BLOCK;
        sums = (float *)(values + columns * BLOCK / 2);
        scores = sums + rows * columns;
        weights = (bf16 *)(scores + rows * BLOCK);
    }

    // Lay out the keys and values of positions [from, to) of the block at `start`; the others are zeros.
    void turn(const bf16 *const *k, const bf16 *const *v, long before, long count) {
        for (long word = 0; word < words; word += LANES)
            for (long first = 0; first < BLOCK; first += LANES) {
                Bits rows[LANES];
                for (int i = 0; i < LANES; i++) {
                    long place = first + i - before;
                    rows[i] = place < 0 || place >= count ? Bits{} : some(k[place], 2 * word);
                }
                transpose(rows);
                for (int i = 0; i < LANES; i++) *(Bits *)(keys + (word + i) * BLOCK + first) = rows[i];
            }
        for (long column = 0; column < columns; column += PAIR)
            for (long pair = 0; pair < BLOCK / 2; pair++) {
                long place = 2 * pair - before;
                Bits a = place < 0 || place >= count ? Bits{} : some(v[place], column);
                Bits b = place + 1 < 0 || place + 1 >= count ? Bits{} : some(v[place + 1], column);
                uint32_t *to = values + column * BLOCK / 2 + pair * PAIR;
                *(Bits *)to = (a & 0xffff) | (b << 16);
                *(Bits *)(to + LANES) = (a >> 16) | (b & 0xffff0000u);
            }
    }

    // PAIR columns of a key or value from `column` on, then zeros.
    Bits some(const bf16 *p, long column) const {
        if (column + PAIR <= dim) return *(const Bits *)(p + column);
        bf16 whole[PAIR] = {};
        if (column < dim) std::memcpy(whole, p + column, (dim - column) * sizeof(bf16));
        return *(const Bits *)whole;
    }
};

// scores[row] = <query, key> for every position of the block, for ROWS rows at a time from `row` on.
template <int ROWS, class Query> static void score(PairScratch &w, long row, long rows, Query query) {
    for (; row + ROWS <= rows; row += ROWS) {
        const bf16 *in[ROWS];
        for (int r = 0; r < ROWS; r++) in[r] = query(row + r);
        for (long first = 0; first < BLOCK; first += 2 * LANES) {
            Vec sum[ROWS][2] = {};
            for (long word = 0; word < w.dim / 2; word++) {
                Bits low = *(const Bits *)(w.keys + word * BLOCK + first);
                Bits high = *(const Bits *)(w.keys + word * BLOCK + first + LANES);
                for (int r = 0; r < ROWS; r++) {
                    Bits x = Bits{} + word_at(in[r] + 2 * word);
                    sum[r][0] = dot(sum[r][0], low, x);
                    sum[r][1] = dot(sum[r][1], high, x);
                }
            }
            for (int r = 0; r < ROWS; r++)
                for (int half = 0; half < 2; half++)
                    put(w.scores + (row + r) * BLOCK + first + half * LANES, sum[r][half]);
        }
    }
    if constexpr (ROWS > 1) score<ROWS / 2>(w, row, rows, query);
}

// The scores of places [begin, end) of a row become weights, those of others 0; `best` and `total` run along, and
// `shrink` is what older sums are multiplied with.
static void weigh(PairScratch &w, long row, float scale, long begin, long end) {
    typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
    if (begin >= end) {
        std::fill(w.weights + row * BLOCK, w.weights + (row + 1) * BLOCK, bf16(0));
        w.shrink[row] = 1;
        return;
    }
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    Vec scores[BLOCK / LANES], most = Vec{} - INFINITY, sum = {};
    for (int i = 0; i < BLOCK / LANES; i++) {
        Ints place = lane + i * LANES;
        scores[i] = *(const Vec *)(w.scores + row * BLOCK + i * LANES) * scale;
        scores[i] = (place >= int(begin)) & (place < int(end)) ? scores[i] : Vec{} - INFINITY;
        most = scores[i] > most ? scores[i] : most;
    }
    Quad parts[LANES / 4];
    std::memcpy(parts, &most, sizeof most);
    for (int i = 1; i < LANES / 4; i++) parts[0] = parts[i] > parts[0] ? parts[i] : parts[0];
    float best = w.best[row];
    for (int i = 0; i < 4; i++) best = parts[0][i] > best ? parts[0][i] : best;
    w.shrink[row] = exp_of(w.best[row] - best);
    for (int i = 0; i < BLOCK / LANES; i++) {
        Vec weights = scores[i] == -INFINITY ? Vec{} : exp_of(scores[i] - best);
        sum += weights;
        put(w.weights + row * BLOCK + i * LANES, weights);
    }
    Quad part = folded(sum);
    w.total[row] = w.total[row] * w.shrink[row] + (part[0] + part[1] + part[2] + part[3]);
    w.best[row] = best;
}

// sums[row] = shrink[row] * sums[row] + weights[row] * values, for ROWS rows at a time from `row` on.
template <int ROWS> static void gather(PairScratch &w, long row, long rows) {
    for (; row + ROWS <= rows; row += ROWS)
        for (long column = 0; column < w.columns; column += PAIR) {
            Vec sum[ROWS][2];
            for (int r = 0; r < ROWS; r++)
                for (int half = 0; half < 2; half++)
                    sum[r][half] = *(const Vec *)(w.sums + (row + r) * w.columns + column + half * LANES) * w.shrink[row + r];
            const uint32_t *values = w.values + column * BLOCK / 2;
            for (long pair = 0; pair < BLOCK / 2; pair++) {
                Bits even = *(const Bits *)(values + pair * PAIR), odd = *(const Bits *)(values + pair * PAIR + LANES);
                for (int r = 0; r < ROWS; r++) {
                    Bits x = Bits{} + word_at(w.weights + (row + r) * BLOCK + 2 * pair);
                    sum[r][0] = dot(sum[r][0], even, x);
                    sum[r][1] = dot(sum[r][1], odd, x);
                }
            }
            for (int r = 0; r < ROWS; r++)
                for (int half = 0; half < 2; half++)
                    put(w.sums + (row + r) * w.columns + column + half * LANES, sum[r][half]);
        }
    if constexpr (ROWS > 1) gather<ROWS / 2>(w, row, rows);
}

// See `task` of attention.cpp.
static void task_of_pairs(const bf16 *q, long q_stride, bf16 *out, const bf16 *k_pages, const bf16 *v_pages,
                          const int32_t *table, const Shape &s, long kv_head, long first, long last, PairScratch &w) {
    long group = s.heads / s.kv_heads, rows = (last - first) * group;
    auto query = [&](long row) { return q + row / group * q_stride + row % group * s.dim; };
    auto oldest = [&](long position) { return s.window ? std::max(0L, position + 1 - s.window) : 0L; };
    std::fill(w.sums, w.sums + rows * w.columns, 0.f);
    std::fill(w.best.begin(), w.best.end(), -INFINITY);
    std::fill(w.total.begin(), w.total.end(), 0.f);
    auto find = [&](long from, long to, const bf16 **at) {
        locate(k_pages, table, s, kv_head, from, to, at);
        locate(v_pages, table, s, kv_head, from, to, at + BLOCK);
    };
    long from = oldest(first), to = std::min(from / BLOCK * BLOCK + BLOCK, last);
    find(from, to, w.at);
    for (; from < last; from = to, to = std::min(to + BLOCK, last), std::swap(w.at, w.next)) {
        if (to < last) {
            find(to, std::min(to + BLOCK, last), w.next);
            for (long i = 0; i < 2 * BLOCK; i++)
                for (long byte = 0; byte < 2 * s.dim; byte += 64) __builtin_prefetch((const char *)w.next[i] + byte);
        }
        long start = from / BLOCK * BLOCK;
        w.turn(w.at, w.at + BLOCK, from - start, to - from);
        score<8>(w, 0, rows, query);
        for (long row = 0; row < rows; row++) {
            long position = first + row / group;
            weigh(w, row, s.scale, std::max(from, oldest(position)) - start, std::min(to, position + 1) - start);
        }
        gather<8>(w, 0, rows);
    }
    for (long row = 0; row < rows; row++) {
        bf16 *to = out + (row / group * s.heads + row % group) * s.dim;
        restore<bf16>(w.sums + row * w.columns, to, s.dim, 1 / w.total[row]);
    }
}
