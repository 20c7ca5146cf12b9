// A task of attention for queries, keys and values in bf16 on processors that multiply pairs of it; see attention.cpp.
//
// What a head has in a page lies there as products want it: a lane is a position of the keys, or a column of the values,
// and nothing is folded:
//
//     keys    words [dim / 2][page_size]     two neighbouring columns of a position
//     values  words [page_size / 2][dim]     a column of two neighbouring positions
//
// A query's word, or its two weights, times one load is LANES products. Where that does not come out even (pages of one
// token, odd numbers of columns) pages are [page_size][dim], and each block is laid out like this first; so is a part of
// a block whose values the task may not read all: they may be NaN, which a weight of zero does not take away.
//
// Scores are fp32; weights are rounded to bf16 for the product with the values.

#pragma once
#include "pairs.h"

constexpr int PARTS = BLOCK / LANES;  // a block is read in parts of LANES positions
constexpr int TOGETHER = 4;           // rows whose scores become weights at the same time

static bool is_laid_out(const Shape &s) { return s.page_size % LANES == 0 && s.dim % LANES == 0; }

// Where the parts of a block are; their words are `key_stride` and `value_stride` apart.
struct Block {
    const uint32_t *keys[PARTS], *values[PARTS];
    long key_stride, value_stride;
};

struct PairScratch {
    long dim, columns, words;
    std::vector<float> memory, best, total, shrink;
    uint32_t *keys, *values;  // [words][BLOCK], [BLOCK / 2][columns]
    float *sums, *scores;
    bf16 *weights;

    PairScratch(long most_rows, long dim) : dim(dim), columns(whole_pairs(dim)), words(whole_pairs(dim) / 2) {
        long rows = (most_rows + TOGETHER - 1) / TOGETHER * TOGETHER;
        memory.resize(words * BLOCK + columns * BLOCK / 2 + rows * (columns + BLOCK + BLOCK / 2) + ALIGN);
        for (auto *column : {&best, &total, &shrink}) column->resize(rows);
        keys = (uint32_t *)aligned(memory.data());
        values = keys + words * BLOCK;
        sums = (float *)(values + columns * BLOCK / 2);
        scores = sums + rows * columns;
        weights = (bf16 *)(scores + rows * BLOCK);
    }

    // The block of positions [from, to) with the pages as they are, but for parts of the values that are not read whole.
    Block find(const bf16 *k_pages, const bf16 *v_pages, const int32_t *table, const Shape &s, long head, long from,
               long to) {
        Block block{{}, {}, s.page_size, dim};
        for (int part = 0; part < PARTS; part++) {
            long start = from / BLOCK * BLOCK + part * LANES;
            block.keys[part] = keys, block.values[part] = values;  // nothing of it is used
            if (start >= to) continue;
            long page = (table[start / s.page_size] * s.kv_heads + head) * s.page_size, offset = start % s.page_size;
            block.keys[part] = (const uint32_t *)(k_pages + page * dim) + offset;
            block.values[part] = (const uint32_t *)(v_pages + page * dim) + offset / 2 * dim;
        }
        return block;
    }

    // Clear what positions outside of [from, to) have in the values of a block that was found.
    void clear(Block &block, long from, long to) {
        long first = from / BLOCK * BLOCK;
        for (int part = 0; part < PARTS; part++) {
            long start = first + part * LANES;
            if (start >= from && start + LANES <= to) continue;
            uint32_t *clean = values + part * LANES / 2 * dim;
            auto is_read = [&](long position) { return position >= from && position < to; };
            for (long pair = 0; pair < LANES / 2; pair++) {
                long even = start + 2 * pair;
                uint32_t kept = (is_read(even) ? 0xffffu : 0) | (is_read(even + 1) ? 0xffff0000u : 0);
                for (long i = 0; i < dim; i++) clean[pair * dim + i] = block.values[part][pair * dim + i] & kept;
            }
            block.values[part] = clean;
        }
    }

    // Lay out the block of positions [from, to) from pages of [page_size][dim].
    Block copy(const bf16 *k_pages, const bf16 *v_pages, const int32_t *table, const Shape &s, long head, long from,
               long to) {
        const bf16 *k[BLOCK], *v[BLOCK];
        locate(k_pages, table, s, head, from, to, k);
        locate(v_pages, table, s, head, from, to, v);
        long before = from % BLOCK, count = to - from;
        auto at = [&](const bf16 *const *rows, long place, long column) {
            return place < before || place - before >= count ? Bits{} : some(rows[place - before], column);
        };
        for (long word = 0; word < words; word += LANES)
            for (long first = 0; first < BLOCK; first += LANES) {
                Bits rows[LANES];
                for (int i = 0; i < LANES; i++) rows[i] = at(k, first + i, 2 * word);
                transpose(rows);
                for (int i = 0; i < LANES; i++) *(Bits *)(keys + (word + i) * BLOCK + first) = rows[i];
            }
        for (long pair = 0; pair < BLOCK / 2; pair++)
            for (long column = 0; column < columns; column += PAIR) {
                bf16 even[PAIR], odd[PAIR];
                *(Bits *)even = at(v, 2 * pair, column), *(Bits *)odd = at(v, 2 * pair + 1, column);
                for (int i = 0; i < PAIR; i++) values[pair * columns + column + i] = even[i] | uint32_t(odd[i]) << 16;
            }
        Block block{{}, {}, BLOCK, columns};
        for (int part = 0; part < PARTS; part++) {
            block.keys[part] = keys + part * LANES;
            block.values[part] = values + part * LANES / 2 * columns;
        }
        return block;
    }

    // PAIR columns of a key or value from `column` on, then zeros.
    Bits some(const bf16 *p, long column) const {
        if (column + PAIR <= dim) return *(const Bits *)(p + column);
        bf16 whole[PAIR] = {};
        if (column < dim) std::memcpy(whole, p + column, (dim - column) * sizeof(bf16));
        return *(const Bits *)whole;
    }
};

// A tile of ROWS rows is followed by smaller ones: the last rows of a task are few, and three are common.
constexpr int fewer(int rows) { return rows > 4 ? rows / 2 : rows - 1; }

// scores[row] = <query, key> for every position of the block, for ROWS rows at a time from `row` on.
template <int ROWS, class Query>
static void score(PairScratch &w, const Block &block, const Block &next, long row, long rows, Query query) {
    for (; row + ROWS <= rows; row += ROWS) {
        const bf16 *in[ROWS];
        for (int r = 0; r < ROWS; r++) in[r] = query(row + r);
        for (int part = 0; part < PARTS; part += 2) {
            Vec sum[ROWS][2] = {};
            for (long word = 0; word < w.dim / 2; word++) {
                Bits low = *(const Bits *)(block.keys[part] + word * block.key_stride);
                Bits high = *(const Bits *)(block.keys[part + 1] + word * block.key_stride);
                if (row == 0)
                    for (int half = 0; half < 2; half++)
                        __builtin_prefetch(next.keys[part + half] + word * next.key_stride);
                for (int r = 0; r < ROWS; r++) {
                    Bits x = Bits{} + word_at(in[r] + 2 * word);
                    sum[r][0] = dot(sum[r][0], low, x);
                    sum[r][1] = dot(sum[r][1], high, x);
                }
            }
            for (int r = 0; r < ROWS; r++)
                for (int half = 0; half < 2; half++)
                    put(w.scores + (row + r) * BLOCK + (part + half) * LANES, sum[r][half]);
        }
    }
    if constexpr (ROWS > 1) score<fewer(ROWS)>(w, block, next, row, rows, query);
}

// Places [begin, end) of a block are what a row sees of it; none of it when begin >= end.
struct Seen {
    int begin, end;
};

// The scores of what each of TOGETHER rows sees become weights, those of other places 0; `best` and `total` run along,
// and `shrink` is what older sums are multiplied with. Together, because each step of it waits for the one before.
static void weigh(PairScratch &w, long row, float scale, const Seen *seen) {
    typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    Vec scores[TOGETHER][PARTS], most[TOGETHER], sum[TOGETHER] = {};
    for (int r = 0; r < TOGETHER; r++) {
        most[r] = Vec{} - INFINITY;
        for (int i = 0; i < PARTS; i++) {
            Ints place = lane + i * LANES;
            Vec score = *(const Vec *)(w.scores + (row + r) * BLOCK + i * LANES) * scale;
            scores[r][i] = (place >= seen[r].begin) & (place < seen[r].end) ? score : Vec{} - INFINITY;
            most[r] = scores[r][i] > most[r] ? scores[r][i] : most[r];
        }
    }
    Quad *bests = (Quad *)&w.best[row], *totals = (Quad *)&w.total[row], old = *bests;
    Quad best = maxima(most[0], most[1], most[2], most[3]);
    best = best > old ? best : old;
    Quad shrink = best == old ? Quad{} + 1 : exp_of(old - best);
    for (int r = 0; r < TOGETHER; r++)
        for (int i = 0; i < PARTS; i++) {
            Vec weights = scores[r][i] == -INFINITY ? Vec{} : exp_of(scores[r][i] - best[r]);
            sum[r] += weights;
            put(w.weights + (row + r) * BLOCK + i * LANES, weights);
        }
    *bests = best;
    *totals = *totals * shrink + sums(sum[0], sum[1], sum[2], sum[3]);
    put(&w.shrink[row], shrink);
}

// sums[row] = shrink[row] * sums[row] + weights[row] * values, of VECTORS registers of columns, ROWS rows from `row` on.
template <int ROWS, int VECTORS>
static void gather_columns(PairScratch &w, const Block &block, const Block &next, long row, long column) {
    Vec sum[ROWS][VECTORS];
    float *sums = w.sums + row * w.columns + column;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] = *(const Vec *)(sums + r * w.columns + v * LANES) * w.shrink[row + r];
    for (int part = 0; part < PARTS; part++)
        for (long pair = 0; pair < LANES / 2; pair++) {
            const uint32_t *values = block.values[part] + pair * block.value_stride + column;
            Bits columns[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                columns[v] = *(const Bits *)(values + v * LANES);
                if (row == 0) __builtin_prefetch(next.values[part] + pair * next.value_stride + column + v * LANES);
            }
            for (int r = 0; r < ROWS; r++) {
                Bits x = Bits{} + word_at(w.weights + (row + r) * BLOCK + part * LANES + 2 * pair);
                for (int v = 0; v < VECTORS; v++) sum[r][v] = dot(sum[r][v], columns[v], x);
            }
        }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) put(sums + r * w.columns + v * LANES, sum[r][v]);
}

template <int ROWS> static void gather(PairScratch &w, const Block &block, const Block &next, long row, long rows) {
    constexpr int VECTORS = ROWS > 4 ? 2 : 4;
    for (; row + ROWS <= rows; row += ROWS) {
        long column = 0;
        for (; column + VECTORS * LANES <= block.value_stride; column += VECTORS * LANES)
            gather_columns<ROWS, VECTORS>(w, block, next, row, column);
        for (; column < block.value_stride; column += LANES) gather_columns<ROWS, 1>(w, block, next, row, column);
    }
    if constexpr (ROWS > 1) gather<fewer(ROWS)>(w, block, next, row, rows);
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
    bool laid_out = is_laid_out(s);
    auto find = [&](long from, long to) { return w.find(k_pages, v_pages, table, s, kv_head, from, to); };
    long from = oldest(first), to = std::min(from / BLOCK * BLOCK + BLOCK, last);
    Block block, next = laid_out ? find(from, to) : Block();
    for (; from < last; from = to, to = std::min(to + BLOCK, last)) {
        if (laid_out) {
            block = next;
            if (to < last) next = find(to, std::min(to + BLOCK, last));
            w.clear(block, from, to);
        } else next = block = w.copy(k_pages, v_pages, table, s, kv_head, from, to);
        score<8>(w, block, next, 0, rows, query);
        long start = from / BLOCK * BLOCK;
        for (long row = 0; row < rows; row += TOGETHER) {
            Seen seen[TOGETHER] = {};
            for (long r = 0; r < TOGETHER && row + r < rows; r++) {
                long position = first + (row + r) / group;
                seen[r] = {int(std::max(from, oldest(position)) - start), int(std::min(to, position + 1) - start)};
            }
            weigh(w, row, s.scale, seen);
        }
        gather<8>(w, block, next, 0, rows);
    }
    for (long row = 0; row < rows; row++) {
        bf16 *to = out + (row / group * s.heads + row % group) * s.dim;
        restore<float>(w.sums + row * w.columns, to, s.dim, 1 / w.total[row]);
    }
}

// Keys and values of one token into its slot.
static void write_laid_out(const bf16 *k, const bf16 *v, bf16 *k_pages, bf16 *v_pages, const Shape &s, long slot) {
    long page = slot / s.page_size, offset = slot % s.page_size;
    for (long head = 0; head < s.kv_heads; head++) {
        long at = (page * s.kv_heads + head) * s.page_size * s.dim;
        uint32_t *keys = (uint32_t *)(k_pages + at) + offset;
        bf16 *values = v_pages + at + offset / 2 * 2 * s.dim + offset % 2;
        for (long i = 0; i < s.dim / 2; i++) keys[i * s.page_size] = word_at(k + head * s.dim + 2 * i);
        for (long i = 0; i < s.dim; i++) values[2 * i] = v[head * s.dim + i];
    }
}
