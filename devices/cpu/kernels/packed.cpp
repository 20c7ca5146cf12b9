// y = x W^T + b with W in 4 or 8 bits. Rows of x are rounded to 8 bits, each 32 elements with a scale of their own, so
// that products are of integers; what they sum to is exact, and is scaled and added up in fp32, block after block. A
// row of y depends on its row of x alone, to the last bit: the order of additions is one for all shapes of tiles.
//
// W lies in panels of LANES rows, a block of 32 columns after the other. A word holds four columns of one row:
//
//     8 bit   quants [panels][blocks][8][LANES] words: columns 4v .. 4v + 3
//     4 bit   quants [panels][blocks][4][LANES] words: columns 4v .. 4v + 3 in the low halves of the bytes,
//                                                      columns 16 + 4v .. 19 + 4v in the high halves
//     scales, minima [panels][blocks][LANES] fp16;     w = scale * (quant - zero) + minimum

#include "numeric.h"
#include <cmath>
#include <memory>
#include <omp.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr long BLOCK = 32;
constexpr int QUADS = BLOCK / 4;
constexpr long CACHED_BYTES = 256 * 1024;  // rounded rows of x that all panels are multiplied with in turn
constexpr long AHEAD = 4096;               // bytes that are fetched before they are needed

// With few rows, a tile takes one panel, so that a thread reads one stream of W. With many, it takes two, so that a
// word of x is used twice. The numbers of rows are those that were fastest, with registers enough.
constexpr long FEW_ROWS = 32;
#ifdef __AVX512F__
constexpr int ONE_PANEL_ROWS = 12, TWO_PANELS_ROWS = 5;
#else
constexpr int ONE_PANEL_ROWS = 4, TWO_PANELS_ROWS = 2;
#endif

// Rows of the tile for what is left of a larger one: powers of two, so that few sizes are compiled.
constexpr int smaller(int rows) {
    int size = 1;
    while (2 * size < rows) size *= 2;
    return size;
}

struct Packed {
    const uint8_t *quants;
    const uint16_t *scales, *minima;  // minima: null where all are 0
    long outs, ins;
    int bits, zero;
    long blocks() const { return (ins + BLOCK - 1) / BLOCK; }
    long panels() const { return (outs + LANES - 1) / LANES; }
};

// A sum here and now: the compiler would rather have all summands first, for which registers do not suffice.
#ifdef __AVX2__
static inline Ints added(Ints sum, Ints summand) {
    sum += summand;
    asm("" : "+v"(sum));
    return sum;
}
#endif

// dot(sum, w, x): to each lane the products of its four bytes of w with those of x, which are the same in every lane.
// Bytes of x are signed and never -128, those of w unsigned. Where no instruction multiplies 8 bit by 8 bit without
// saturating, w comes with its offset of 128 taken off (SIGNED_8).
#if defined(__AVX512VNNI__)
constexpr bool SIGNED_8 = false;
template <int BITS> static inline Ints dot(Ints sum, Ints w, Ints x) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
#elif defined(__AVX512BW__)
constexpr bool SIGNED_8 = true;
template <int BITS> static inline Ints dot(Ints sum, Ints w, Ints x) {
    __m512i unsign = (__m512i)w, sign = (__m512i)x;
    if (BITS == 8) {
        __m512i flipped = _mm512_sub_epi8(_mm512_setzero_si512(), sign);
        sign = _mm512_mask_mov_epi8(sign, _mm512_movepi8_mask(unsign), flipped);
        unsign = _mm512_abs_epi8(unsign);
    }
    return added(sum, (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(unsign, sign), _mm512_set1_epi16(1)));
}
#elif defined(__AVX512F__)
#define LANE_BY_LANE
#elif defined(__AVXVNNI__)
constexpr bool SIGNED_8 = false;
template <int BITS> static inline Ints dot(Ints sum, Ints w, Ints x) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
#elif defined(__AVX2__)
constexpr bool SIGNED_8 = true;
template <int BITS> static inline Ints dot(Ints sum, Ints w, Ints x) {
    __m256i unsign = (__m256i)w, sign = (__m256i)x;
    if (BITS == 8) {
        sign = _mm256_sign_epi8(sign, unsign);
        unsign = _mm256_abs_epi8(unsign);
    }
    return added(sum, (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(unsign, sign), _mm256_set1_epi16(1)));
}
#else
#define LANE_BY_LANE
#endif
#ifdef LANE_BY_LANE
constexpr bool SIGNED_8 = false;
template <int BITS> static inline Ints dot(Ints sum, Ints w, Ints x) {
    for (int byte = 0; byte < 4; byte++) sum += (w >> 8 * byte & 255) * (x << 8 * (3 - byte) >> 24);
    return sum;
}
#endif

// fp16 to fp32, infinities and NaN aside: the exponent is moved by a product, which is exact for subnormals too.
static inline float half(uint16_t bits) {
    float size = bits_as<float>(uint32_t(bits & 0x7fff) << 13) * 0x1p112f;
    return bits & 0x8000 ? -size : size;
}

static inline Vec halves(const uint16_t *p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    Vec result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = half(p[lane]);
    return result;
#endif
}

typedef int32_t FourInts __attribute__((vector_size(16)));

// `join` of all lanes.
template <class Join> static inline int32_t joined_lanes(Ints x, Join join) {
    FourInts parts[LANES / 4];
    std::memcpy(parts, &x, sizeof x);
    FourInts all = parts[0];
    for (int i = 1; i < LANES / 4; i++) all = join(all, parts[i]);
    all = join(all, __builtin_shuffle(all, FourInts{2, 3, 0, 1}));
    return join(all, __builtin_shuffle(all, FourInts{1, 0, 3, 2}))[0];
}
static inline int32_t sum_of_lanes(Ints x) {
    return joined_lanes(x, [](FourInts a, FourInts b) { return a + b; });
}
static inline int32_t largest_lane(Ints x) {
    return joined_lanes(x, [](FourInts a, FourInts b) { return a > b ? a : b; });
}

// The integers nearest to x, which has none beyond 8 bits, NaN aside: adding 1.5 * 2^23 leaves them in the low bits.
static inline Ints rounded_bytes(Vec x) { return (Ints)(x + 12582912.f) << 24 >> 24; }

// The low bytes of the lanes of a pair, in the order of its elements.
template <class T> static inline void put_bytes(uint8_t *to, Ints low, Ints high) {
    typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    if (same<T, bf16>) {  // they alternate
        Halves words = __builtin_convertvector((low & 255) | (high & 255) << 8, Halves);
        std::memcpy(to, &words, sizeof words);
    } else {
        Bytes bytes[2] = {__builtin_convertvector(low, Bytes), __builtin_convertvector(high, Bytes)};
        std::memcpy(to, bytes, sizeof bytes);
    }
}

// A block of ROWS rows of x in 8 bits: x = scale * quant. `start` is what a sum begins with (the zero of the weight
// times -sum(quant)), `total` is scale * sum(quant), which a minimum is multiplied with. All that a tile reads of x is
// one stream, at distances that the compiler knows.
template <int ROWS> struct RoundedBlock {
    int32_t quads[QUADS][ROWS], start[ROWS];
    float scale[ROWS], total[ROWS];

    // The first `count` elements, then zeros. An infinity or NaN is the scale too: nothing of y's row is finite then.
    template <class T> void take(int row, const T *x, long count, int zero) {
        constexpr int PAIRS = BLOCK / PAIR;
        Pair in[PAIRS];
        Ints sizes = {}, sums = {};  // bits of floats without a sign are in their order, NaN above infinity
        for (int i = 0; i < PAIRS; i++) {
            long left = count - i * PAIR;
            in[i] = left >= PAIR ? load(x + i * PAIR) : left > 0 ? load_some(x + i * PAIR, left) : Pair{};
            Ints low = (Ints)in[i].low & INT32_MAX, high = (Ints)in[i].high & INT32_MAX;
            sizes = low > sizes ? low : sizes;
            sizes = high > sizes ? high : sizes;
        }
        float largest = bits_as<float>(largest_lane(sizes)), inverse = largest > 1e-30f ? 127 / largest : 0;
        uint8_t bytes[BLOCK];
        for (int i = 0; i < PAIRS; i++) {
            Ints low = rounded_bytes(in[i].low * inverse), high = rounded_bytes(in[i].high * inverse);
            put_bytes<T>(bytes + i * PAIR, low, high);
            sums += low + high;
        }
        for (int v = 0; v < QUADS; v++) std::memcpy(&quads[v][row], bytes + 4 * v, 4);
        int32_t sum = sum_of_lanes(sums);
        start[row] = -zero * sum;
        scale[row] = largest * (1.f / 127);
        total[row] = scale[row] * sum;
    }
};

// Rows [row, row + ROWS) of those that lie together, with PANELS panels. `fetch`: W is not in the cache yet.
template <int BITS, bool MIN, int ROWS, int PANELS, int TOGETHER>
__attribute__((noinline)) static void tile(const RoundedBlock<TOGETHER> *x, int row, bool fetch, const Packed &w,
                                           long panel, Vec (&result)[ROWS][PANELS]) {
    constexpr long WORDS = BITS == 8 ? 8 : 4;  // vectors of words in a block
    long blocks = w.blocks();
    Vec sum[ROWS][PANELS] = {};
    for (long b = 0; b < blocks; b++) {
        Ints dots[ROWS][PANELS];
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) dots[r][p] = Ints{} + x[b].start[row + r];
        for (int v = 0; v < WORDS; v++) {
            Ints low[PANELS], high[PANELS];
            for (int p = 0; p < PANELS; p++) {
                const uint8_t *at = w.quants + (((panel + p) * blocks + b) * WORDS + v) * LANES * 4;
                Ints words = *(const Ints *)at;
                if (fetch) __builtin_prefetch(at + AHEAD);
                low[p] = BITS == 4 ? words & 0x0f0f0f0f : SIGNED_8 ? words ^ int(0x80808080) : words;
                high[p] = words >> 4 & 0x0f0f0f0f;
            }
            for (int r = 0; r < ROWS; r++) {
                Ints quad = Ints{} + x[b].quads[v][row + r];
                for (int p = 0; p < PANELS; p++) dots[r][p] = dot<BITS>(dots[r][p], low[p], quad);
            }
            if (BITS == 8) continue;
            for (int r = 0; r < ROWS; r++) {
                Ints quad = Ints{} + x[b].quads[4 + v][row + r];
                for (int p = 0; p < PANELS; p++) dots[r][p] = dot<BITS>(dots[r][p], high[p], quad);
            }
        }
        for (int p = 0; p < PANELS; p++) {
            long at = ((panel + p) * blocks + b) * LANES;
            Vec scale = halves(w.scales + at), minimum = {};
            if (MIN) minimum = halves(w.minima + at);
            for (int r = 0; r < ROWS; r++) {
                sum[r][p] += __builtin_convertvector(dots[r][p], Vec) * (scale * x[b].scale[row + r]);
                if (MIN) sum[r][p] += minimum * x[b].total[row + r];
            }
        }
    }
    std::memcpy(result, sum, sizeof sum);
}

template <class T, class Y> static inline void finish(Vec sum, long out, const Packed &w, const T *bias, Y *y) {
    long left = w.outs - out;
    if (left >= LANES && !bias) {
        put(y + out, sum);
        return;
    }
    for (long i = 0; i < LANES && i < left; i++) put(y[out + i], sum[i] + (bias ? widen(bias[out + i]) : 0));
}

// Rows [row, rows) of those that lie together: tiles of ROWS rows, then smaller ones.
template <int BITS, bool MIN, int ROWS, int PANELS, int TOGETHER, class T, class Y>
static void tiles(const RoundedBlock<TOGETHER> *x, int row, int rows, bool fetch, const Packed &w, long panel,
                  const T *bias, Y *y) {
    for (; row + ROWS <= rows; row += ROWS) {
        Vec sum[ROWS][PANELS];
        // Rows of y lie far apart: their lines are fetched while the tile computes.
        for (int r = 0; r < ROWS; r++) __builtin_prefetch(y + (row + r) * w.outs + panel * LANES, 1);
        tile<BITS, MIN>(x, row, fetch && row == 0, w, panel, sum);
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) finish(sum[r][p], (panel + p) * LANES, w, bias, y + (row + r) * w.outs);
    }
    if constexpr (ROWS > 1) tiles<BITS, MIN, smaller(ROWS), PANELS>(x, row, rows, fetch, w, panel, bias, y);
}

// `rows` rows of x with PANELS panels.
template <int BITS, bool MIN, int PANELS, int ROWS, class T, class Y>
static void strip(const RoundedBlock<ROWS> *x, long rows, const Packed &w, long panel, const T *bias, Y *y) {
    for (long row = 0; row < rows; row += ROWS, x += w.blocks()) {
        int count = rows - row < ROWS ? rows - row : ROWS;
        tiles<BITS, MIN, ROWS, PANELS>(x, 0, count, row == 0, w, panel, bias, y + row * w.outs);
    }
}

template <int BITS, bool MIN, int PANELS, int ROWS, class T, class Y>
static void linear(const T *x, long x_stride, const Packed &w, const T *bias, Y *y, long rows, int threads) {
    long blocks = w.blocks(), panels = w.panels(), groups = (panels + PANELS - 1) / PANELS;
    long chunk = CACHED_BYTES / (blocks * BLOCK) / ROWS * ROWS;
    if (chunk < ROWS) chunk = ROWS;
    if (chunk > rows) chunk = rows;
    std::unique_ptr<RoundedBlock<ROWS>[]> rounded(new RoundedBlock<ROWS>[(chunk + ROWS - 1) / ROWS * blocks]);
    int zero = BITS == 8 && SIGNED_8 ? 0 : w.zero;
    long part = groups / (4 * threads) + 1;
#pragma omp parallel num_threads(threads)
    for (long first = 0; first < rows; first += chunk) {
        long count = rows - first < chunk ? rows - first : chunk;
#pragma omp for schedule(static)
        for (long row = 0; row < count; row++)
            for (long b = 0; b < blocks; b++)
                rounded[row / ROWS * blocks + b].take(row % ROWS, x + (first + row) * x_stride + b * BLOCK,
                                                      w.ins - b * BLOCK, zero);
#pragma omp for schedule(dynamic, part)
        for (long group = 0; group < groups; group++) {
            long panel = group * PANELS;
            Y *to = y + first * w.outs;
            if (panel + PANELS <= panels) strip<BITS, MIN, PANELS>(rounded.get(), count, w, panel, bias, to);
            else strip<BITS, MIN, 1>(rounded.get(), count, w, panel, bias, to);
        }
    }
}

template <int BITS, bool MIN, class T, class Y>
static void linear_of(const T *x, long stride, const Packed &w, const T *bias, Y *y, long rows, int threads) {
    if (rows == 1) linear<BITS, MIN, 1, 1>(x, stride, w, bias, y, rows, threads);
    else if (rows <= FEW_ROWS) linear<BITS, MIN, 1, ONE_PANEL_ROWS>(x, stride, w, bias, y, rows, threads);
    else linear<BITS, MIN, 2, TWO_PANELS_ROWS>(x, stride, w, bias, y, rows, threads);
}

template <class T, class Y>
static void linear_of(const T *x, long stride, const Packed &w, const T *bias, Y *y, long rows, int threads) {
    if (w.bits == 8) linear_of<8, false>(x, stride, w, bias, y, rows, threads);
    else if (w.minima) linear_of<4, true>(x, stride, w, bias, y, rows, threads);
    else linear_of<4, false>(x, stride, w, bias, y, rows, threads);
}

// out[i] = row ids[i] of W.
template <class T> static void rows_of(const Packed &w, const int64_t *ids, T *out, long count, int threads) {
    long blocks = w.blocks();
#pragma omp parallel for num_threads(threads) if (count > 8)
    for (long i = 0; i < count; i++) {
        long panel = ids[i] / LANES, lane = ids[i] % LANES;
        for (long k = 0; k < w.ins; k++) {
            long b = k / BLOCK, in = k % BLOCK, at = panel * blocks + b;
            long word = w.bits == 8 ? at * 8 + in / 4 : at * 4 + in % 16 / 4;
            int quant = w.quants[(word * LANES + lane) * 4 + in % 4];
            if (w.bits == 4) quant = in < 16 ? quant & 15 : quant >> 4;
            float minimum = w.minima ? half(w.minima[at * LANES + lane]) : 0;
            put(out[i * w.ins + k], half(w.scales[at * LANES + lane]) * (quant - w.zero) + minimum);
        }
    }
}

extern "C" {
extern const int packed_lanes = LANES;
void packed_linear_bf16_bf16(const bf16 *x, long xs, const void *w, const bf16 *b, bf16 *y, long rows, long, long, int t) {
    linear_of(x, xs, *(const Packed *)w, b, y, rows, t);
}
void packed_linear_bf16_f32(const bf16 *x, long xs, const void *w, const bf16 *b, float *y, long rows, long, long, int t) {
    linear_of(x, xs, *(const Packed *)w, b, y, rows, t);
}
void packed_linear_f32_f32(const float *x, long xs, const void *w, const float *b, float *y, long rows, long, long, int t) {
    linear_of(x, xs, *(const Packed *)w, b, y, rows, t);
}
void packed_rows_bf16(const Packed *w, const int64_t *ids, bf16 *out, long count, int t) {
    rows_of(*w, ids, out, count, t);
}
void packed_rows_f32(const Packed *w, const int64_t *ids, float *out, long count, int t) {
    rows_of(*w, ids, out, count, t);
}
}
