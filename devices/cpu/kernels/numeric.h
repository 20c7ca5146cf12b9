// Numbers of the kernels: bf16 and fp32 elements, widened to fp32 in registers and rounded once when they are stored.
//
// A `Pair` is two registers of floats made of PAIR consecutive elements. For fp32 they stand in order. For bf16 one
// load of 32-bit words gives both: the low halves (elements 0, 2, 4, ...) and the high halves (1, 3, 5, ...), at one
// cheap instruction each. Products and sums do not care in which order elements stand, if both operands agree:
// `arrange` puts fp32 copies of the other operand into the order of a type, `restore` undoes it.

#pragma once
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int PAIR = 2 * LANES;

typedef uint16_t bf16;
typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4), aligned(2), may_alias));

struct Pair {
    Vec low, high;
};

template <class To, class From> static inline To bits_as(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { return bits_as<float>(uint32_t(x) << 16); }

static inline void put(float &to, float x) { to = x; }

// Round to nearest even; NaN stays NaN, which plain rounding would carry over into the sign.
static inline void put(bf16 &to, float x) {
    uint32_t bits = bits_as<uint32_t>(x);
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    to = bf16((x == x ? rounded : bits | 0x400000) >> 16);
}

static inline Pair load(const float *p) { return {*(const Vec *)p, *(const Vec *)(p + LANES)}; }

static inline Pair load(const bf16 *p) {
    Bits words = *(const Bits *)p;
    return {(Vec)(words << 16), (Vec)(words & 0xffff0000u)};
}

// `n < PAIR` elements, then zeros.
template <class T> static inline Pair load_some(const T *p, long n) {
    T whole[PAIR] = {};
    std::memcpy(whole, p, n * sizeof(T));
    return load(whole);
}

static inline void store(float *p, Pair x) {
    *(Vec *)p = x.low;
    *(Vec *)(p + LANES) = x.high;
}

// The bits of bf16 of each lane, in the low half: rounded as `put` does.
static inline Bits rounded(Vec x) {
    Bits bits = (Bits)x;
    return (x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) >> 16;
}

static inline void store(bf16 *p, Pair x) { *(Bits *)p = rounded(x.low) | rounded(x.high) << 16; }

constexpr long ALIGN = 16;  // floats in a cache line; a load that crosses lines costs two

static inline float *aligned(float *p) { return (float *)((uintptr_t(p) + 63) & ~uintptr_t(63)); }

constexpr long whole_pairs(long n) { return (n + PAIR - 1) / PAIR * PAIR; }

// Where element `i` of a pair of T stands in it.
static inline long place(const float *, long i) { return i; }
static inline long place(const bf16 *, long i) { return i % 2 * LANES + i / 2; }

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

// to[whole_pairs(n)] = scale * from[n], then zeros, in the order of pairs of T.
template <class T, class From> static inline void arrange(const From *from, float *to, long n, float scale = 1) {
    for (long k = 0; k < n; k += PAIR) {
        long count = n - k < PAIR ? n - k : PAIR;
        if constexpr (same<T, From>) {
            Pair x = count == PAIR ? load(from + k) : load_some(from + k, count);
            store(to + k, {x.low * scale, x.high * scale});
        } else {
            std::memset(to + k, 0, PAIR * sizeof(float));
            for (long i = 0; i < count; i++) to[k + place((const T *)nullptr, i)] = scale * widen(from[k + i]);
        }
    }
}

// to[n] = scale * from, which stands in the order of pairs of T.
template <class T, class To> static inline void restore(const float *from, To *to, long n, float scale) {
    for (long k = 0; k < n; k += PAIR)
        for (long i = 0; i < PAIR && k + i < n; i++) put(to[k + i], scale * from[k + place((const T *)nullptr, i)]);
}

// e^x, within 2 units in the last place from -87 to 88 and clamped there. Cody-Waite reduction, Taylor series.
static inline float exp_of(float x) {
    x = x < -87.f ? -87.f : x;
    x = x > 88.f ? 88.f : x;
    const float shift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
    float shifted = x * 1.44269504f + shift, n = shifted - shift;
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + .5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    return p * bits_as<float>((bits_as<uint32_t>(shifted) + 127) << 23);
}

static inline void put(float *to, Vec x) { *(Vec *)to = x; }

// As `put` of one element, for LANES.
static inline void put(bf16 *to, Vec x) {
    typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
    typedef bf16 Halves __attribute__((vector_size(LANES * 2)));
    Words bits = (Words)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    Halves halves = __builtin_convertvector((x == x ? rounded : bits | 0x400000) >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// The same of each lane of a vector of floats; `Words` has as many lanes.
template <class Floats, class Words> static inline Floats exp_lanes(Floats x) {
    x = x < -87.f ? Floats{} - 87.f : x;
    x = x > 88.f ? Floats{} + 88.f : x;
    Floats shifted = x * 1.44269504f + 12582912.f, n = shifted - 12582912.f;
    Floats r = x - n * 0.693145752f - n * 1.42860677e-6f;
    Floats p = r * (1.f / 720) + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + .5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    return p * (Floats)(((Words)shifted + 127) << 23);
}

typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t QuadWords __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

static inline Vec exp_of(Vec x) { return exp_lanes<Vec, Words>(x); }
static inline Quad exp_of(Quad x) { return exp_lanes<Quad, QuadWords>(x); }

static inline void put(float *to, Quad x) { std::memcpy(to, &x, sizeof x); }

static inline void put(bf16 *to, Quad x) {
    typedef uint32_t Words __attribute__((vector_size(16)));
    typedef bf16 Halves __attribute__((vector_size(8)));
    Words bits = (Words)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    Halves halves = __builtin_convertvector((x == x ? rounded : bits | 0x400000) >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

static inline Quad folded(Vec x) {
    Quad parts[LANES / 4];
    std::memcpy(parts, &x, sizeof x);
    Quad sum = parts[0];
    for (int i = 1; i < LANES / 4; i++) sum += parts[i];
    return sum;
}

// The largest of four registers' lanes, of which none is NaN.
static inline Quad maxima(Vec a, Vec b, Vec c, Vec d) {
    typedef int32_t Order __attribute__((vector_size(16)));
    auto larger = [](Quad x, Quad y) { return x > y ? x : y; };
    auto fold = [&](Vec x) {
        Quad parts[LANES / 4], most;
        std::memcpy(parts, &x, sizeof x);
        most = parts[0];
        for (int i = 1; i < LANES / 4; i++) most = larger(most, parts[i]);
        return most;
    };
    Quad fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
    Quad ab = larger(__builtin_shuffle(fa, fb, Order{0, 1, 4, 5}), __builtin_shuffle(fa, fb, Order{2, 3, 6, 7}));
    Quad cd = larger(__builtin_shuffle(fc, fd, Order{0, 1, 4, 5}), __builtin_shuffle(fc, fd, Order{2, 3, 6, 7}));
    return larger(__builtin_shuffle(ab, cd, Order{0, 2, 4, 6}), __builtin_shuffle(ab, cd, Order{1, 3, 5, 7}));
}

// The sums of four registers' lanes.
static inline Quad sums(Vec a, Vec b, Vec c, Vec d) {
    typedef int32_t Order __attribute__((vector_size(16)));
    Quad fa = folded(a), fb = folded(b), fc = folded(c), fd = folded(d);
    Quad ab = __builtin_shuffle(fa, fb, Order{0, 1, 4, 5}) + __builtin_shuffle(fa, fb, Order{2, 3, 6, 7});
    Quad cd = __builtin_shuffle(fc, fd, Order{0, 1, 4, 5}) + __builtin_shuffle(fc, fd, Order{2, 3, 6, 7});
    return __builtin_shuffle(ab, cd, Order{0, 2, 4, 6}) + __builtin_shuffle(ab, cd, Order{1, 3, 5, 7});
}

constexpr int COLUMNS = 4;   // rows of the weight, or keys, that a tile takes
constexpr int MAX_ROWS = 2;  // of x; 8 sums leave AVX2 enough registers, more of them were slower

// result[row][column] = <x[row], w[column]>. An element's order of additions does not depend on ROWS.
// x: arranged for T, rows `stride` apart; w: `size` elements each. `fetch(k)` is called once for PAIR elements, to
// prefetch what comes next: the processor's own guesses reach a half of the memory's speed with short rows.
template <int ROWS, class T, class Fetch>
static inline void tile(const float *x, long stride, const T *const *w, long size, Fetch fetch, Quad *result) {
    Vec sum[ROWS][COLUMNS] = {};
    auto add = [&](long k, auto weight) {
        fetch(k);
        for (int half = 0; half < 2; half++) {
            Vec in[ROWS];
            for (int row = 0; row < ROWS; row++) in[row] = *(const Vec *)(x + row * stride + k + half * LANES);
            for (int column = 0; column < COLUMNS; column++) {
                Pair pair = weight(w[column] + k);
                Vec part = half ? pair.high : pair.low;
                for (int row = 0; row < ROWS; row++) sum[row][column] += in[row] * part;
            }
        }
    };
    long k = 0;
    for (; k + PAIR <= size; k += PAIR) add(k, [](const T *p) { return load(p); });
    if (k < size) add(k, [=](const T *p) { return load_some(p, size - k); });
    for (int row = 0; row < ROWS; row++) result[row] = sums(sum[row][0], sum[row][1], sum[row][2], sum[row][3]);
}

// `tile` for every row of x, with `fetch` in the first; `use(row, dots)` gets the results.
template <class T, class Fetch, class Use>
static inline void tiles(const float *x, long stride, long rows, const T *const *w, long size, Fetch fetch, Use use) {
    Quad result[MAX_ROWS];
    auto nothing = [](long) {};
    for (long row = 0; row < rows; row += MAX_ROWS) {
        long left = rows - row;
        const float *in = x + row * stride;
        if (left == 1 && row == 0) tile<1>(in, stride, w, size, fetch, result);
        else if (left == 1) tile<1>(in, stride, w, size, nothing, result);
        else if (row == 0) tile<2>(in, stride, w, size, fetch, result);
        else tile<2>(in, stride, w, size, nothing, result);
        for (long i = 0; i < MAX_ROWS && i < left; i++) use(row + i, result[i]);
    }
}
