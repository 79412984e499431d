// Products of a few rows with a weight [out, in], as files have it, in any form; it is read from memory once.
// Each number of y is one sum in one order, whatever the number of rows and of threads is: first of STEP inputs after the
// other in VL lanes, then of the lanes.
// Sums of single numbers name fmaf: compilers fuse some of their loops, as those of vectors, and others not.
#include <stdbool.h>

#include "products.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define STEP (2 * VL)   // inputs that are read at once
#define NEAR_OUTPUTS 8  // that become float32 at once, so that they stay in a near cache
#if VL == 16
#define TILE_ROWS 6     // of sums in registers, with 4 outputs
#define WIDE_ROWS 2     // the same with 8 outputs, at most
#define LINES(form) ((form) == OUTPUTS_FIRST ? 2 : 1)  // of the cache, of STEP weights of an output
#else
#define TILE_ROWS 2
#define WIDE_ROWS 1
#define LINES(form) 1
#endif

typedef int8_t bytes_VL __attribute__((vector_size(VL)));
typedef uint8_t codes_VL __attribute__((vector_size(VL)));

// Rows of x: the first inputs as `pack_rows` lays them, and where the others are.
typedef struct {
    const float *packed, *x;
    int64_t x_line;
} Rows;

INLINE vf sixteen_levels(const float* levels, codes_VL codes) {
#if defined(__clang__)
    vf found;
    for (int i = 0; i < VL; i++) found[i] = levels[codes[i]];
    return found;
#elif VL == 16
    return __builtin_shuffle(load(levels), __builtin_convertvector(codes, vi));
#else
    return __builtin_shuffle(load(levels), load(levels + VL), __builtin_convertvector(codes, vi));
#endif
}

INLINE vf from_bytes(const int8_t* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    bytes_VL codes;
    memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(codes, vf);
#endif
}

// Of nibbles; groups are powers of two.
INLINE float scale_at(const Linear* w, int64_t o, int64_t i) {
    return w->scales[(o * w->inputs + i) >> __builtin_ctzll((uint64_t)w->group)];
}

// Half of STEP weights of output o from input i on; of pairs the even or the odd inputs.
// Those of bytes still have to be multiplied by the scale.
INLINE vf read_weights(const enum Form form, const int half, const Linear* w, int64_t o, int64_t i) {
    int64_t at = o * w->inputs + i;
    if (form == OUTPUTS_FIRST) return load((const float*)w->weight + at + half * VL);
    if (form == BYTES) return from_bytes((const int8_t*)w->weight + at + half * VL);
    if (form == BF16) {
        vi pairs;
        memcpy(&pairs, (const uint16_t*)w->weight + at, sizeof pairs);
        return as_float(half ? pairs & (int32_t)0xffff0000 : pairs << 16);
    }
    codes_VL codes;
    memcpy(&codes, (const uint8_t*)w->weight + at / 2, sizeof codes);
    return sixteen_levels(w->levels, half ? codes >> 4 : codes & 15) * splat(scale_at(w, o, i));
}

// Whether a vector of memory has two of weights in it, the even and the odd inputs.
INLINE bool in_pairs(const enum Form form) { return form == BF16 || form == NIBBLES; }

INLINE float read_weight(const enum Form form, const Linear* w, int64_t o, int64_t i) {
    int64_t at = o * w->inputs + i;
    if (form == OUTPUTS_FIRST) return ((const float*)w->weight)[at];
    if (form == BYTES) return ((const int8_t*)w->weight)[at];
    if (form == BF16) return widened(((const uint16_t*)w->weight)[at]);
    uint8_t codes = ((const uint8_t*)w->weight)[at / 2];
    return w->levels[i % 2 ? codes >> 4 : codes & 15] * scale_at(w, o, i);
}

// The memory of so many weights
INLINE int64_t bytes_of(const enum Form form, int64_t weights) {
    return form == OUTPUTS_FIRST ? 4 * weights : form == BF16 ? 2 * weights : form == BYTES ? weights : weights / 2;
}

// Of two vectors, of every 2 width lanes the first ones, by width from VL / 2 to 1.
static const vi FIRST_LANES[] = {
#if VL == 16
    {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
    {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
    {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
    {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}
#else
    {0, 1, 2, 3, 8, 9, 10, 11},
    {0, 1, 4, 5, 8, 9, 12, 13},
    {0, 2, 4, 6, 8, 10, 12, 14}
#endif
};

// Lane i of the result is the sum of the lanes of sums[i], in the order of sum_of.
INLINE vf sums_of(const vf sums[VL]) {
    vf level[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) level[i] = sums[i];
#pragma GCC unroll 4
    for (int width = VL / 2, number = 0; width > 0; width /= 2, number++)
#pragma GCC unroll 8
        for (int i = 0; i < width; i++) {
            vf a = level[2 * i], b = level[2 * i + 1];
            vi first = FIRST_LANES[number];
            level[i] = shuffle(a, b, first) + shuffle(a, b, first + width);
        }
    return level[0];
}

// The inputs that are read STEP at once; the rest one by one.
INLINE int64_t whole_steps(const enum Form form, const Linear* w) {
    return form == NIBBLES && w->group % STEP ? 0 : w->inputs / STEP * STEP;
}

// The first `whole` inputs: of TILE_ROWS rows, or as many as are left, STEP inputs of each after the other; those of pairs
// first the even ones. So rows that lie a power of two apart do not drive each other out of the cache.
static void pack_rows(bool pairs, int64_t whole, int64_t rows, const float* x, int64_t x_line, float* packed) {
    vi even, odd;
    for (int k = 0; k < VL; k++) even[k] = 2 * k, odd[k] = 2 * k + 1;
    for (int64_t r = 0; r < rows; r++, x += x_line) {
        int64_t tile = r / TILE_ROWS * TILE_ROWS, together = rows - tile < TILE_ROWS ? rows - tile : TILE_ROWS;
        float* to = packed + tile * whole + (r - tile) * STEP;
        for (int64_t i = 0; i < whole; i += STEP, to += together * STEP) {
            vf first = load(x + i), second = load(x + i + VL);
            store(to, pairs ? shuffle(first, second, even) : first);
            store(to + VL, pairs ? shuffle(first, second, odd) : second);
        }
    }
}

// `outputs` of `rows` from o on, whose inputs lie `step` numbers apart in what is packed. Of the lines that hold the next
// outputs, those of each STEP from `ask` up to `asked` are asked for.
INLINE void tile(const enum Form form, const int rows, const int outputs, int ask, int asked, const Linear* w, int64_t o,
                 Rows from, int64_t step, float* y, int64_t line) {
    vf sums[(TILE_ROWS * 4 + VL - 1) / VL * VL] = {{0}};
    int64_t whole = whole_steps(form, w);
    const float* x = from.packed;
    const char* next = (const char*)w->weight + bytes_of(form, (o + outputs) * w->inputs);
    for (int64_t i = 0; i < whole; i += STEP, x += step) {
        for (int l = ask; l < asked; l++) {
            const char* row = next + bytes_of(form, l / LINES(form) * w->inputs + i);
            __builtin_prefetch(row + l % LINES(form) * 64, 0, 2);  // into the second cache
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            vf weights[8];
#pragma GCC unroll 8
            for (int j = 0; j < outputs; j++) weights[j] = read_weights(form, half, w, o + j, i);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                vf own = load(x + r * STEP + half * VL);
#pragma GCC unroll 8
                for (int j = 0; j < outputs; j++) sums[r * outputs + j] += own * weights[j];
            }
        }
    }
    for (int first = 0; first < rows * outputs; first += VL) {
        vf together = sums_of(sums + first);
        for (int k = first; k < rows * outputs && k < first + VL; k++) {
            int64_t r = k / outputs, j = k % outputs;
            float sum = together[k - first];
            for (int64_t i = whole; i < w->inputs; i++)
                sum = fmaf(from.x[r * from.x_line + i], read_weight(form, w, o + j, i), sum);
            y[r * line + o + j] = form == BYTES ? sum * w->scales[o + j] : sum;
        }
    }
}

// 4 outputs of all rows, from o on. Tiles of rows share the asking: all at once would have to wait.
INLINE void four_outputs(const enum Form form, const Linear* w, int64_t o, int64_t rows, Rows from, float* y, int64_t line) {
    int64_t whole = whole_steps(form, w), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t t = 0; t < tiles; t++) {
        int ask = (int)(4 * LINES(form) * t / tiles), asked = (int)(4 * LINES(form) * (t + 1) / tiles);
        switch (rows - t * TILE_ROWS) {
            case 1: tile(form, 1, 4, ask, asked, w, o, from, STEP, y, line); break;
#if TILE_ROWS > 2
            case 2: tile(form, 2, 4, ask, asked, w, o, from, 2 * STEP, y, line); break;
            case 3: tile(form, 3, 4, ask, asked, w, o, from, 3 * STEP, y, line); break;
            case 4: tile(form, 4, 4, ask, asked, w, o, from, 4 * STEP, y, line); break;
            case 5: tile(form, 5, 4, ask, asked, w, o, from, 5 * STEP, y, line); break;
#endif
            default: tile(form, TILE_ROWS, 4, ask, asked, w, o, from, TILE_ROWS * STEP, y, line);
        }
        from.packed += TILE_ROWS * whole, from.x += TILE_ROWS * from.x_line, y += TILE_ROWS * line;
    }
}

INLINE void one_output(const enum Form form, const Linear* w, int64_t o, int64_t rows, Rows from, float* y, int64_t line) {
    int64_t whole = whole_steps(form, w);
    for (int64_t r = 0; r < rows; r++) {
        int64_t first = r / TILE_ROWS * TILE_ROWS, together = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
        Rows own = {from.packed + first * whole + (r - first) * STEP, from.x + r * from.x_line, from.x_line};
        tile(form, 1, 1, 0, 0, w, o, own, together * STEP, y + r * line, line);
    }
}

INLINE void some_outputs(const enum Form form, const Linear* w, Range columns, int64_t rows, Rows from, float* y,
                         int64_t line) {
    int64_t o = columns.begin;
    if (rows == 1)
        for (; o + 8 <= columns.end; o += 8) tile(form, 1, 8, 0, 8 * LINES(form), w, o, from, STEP, y, line);
    if (rows == 2 && WIDE_ROWS > 1)
        for (; o + 8 <= columns.end; o += 8) tile(form, 2, 8, 0, 8 * LINES(form), w, o, from, 2 * STEP, y, line);
    for (; o + 4 <= columns.end; o += 4) four_outputs(form, w, o, rows, from, y, line);
    for (; o < columns.end; o++) one_output(form, w, o, rows, from, y, line);
}

// float32 weights [count, in] of outputs from o on, those of pairs in the order of `pack_rows` unless `in_order`; those of
// bytes in units of the scale.
INLINE void make_dense(const enum Form form, const bool in_order, const Linear* w, int64_t o, int64_t count, float* dense) {
    int64_t whole = whole_steps(form, w);
    vi low, high;
    for (int k = 0; k < VL; k++) low[k] = k / 2 + k % 2 * VL, high[k] = low[k] + VL / 2;
    for (int64_t j = 0; j < count; j++, dense += w->inputs) {
        for (int64_t i = 0; i < whole; i += STEP) {
            vf first = read_weights(form, 0, w, o + j, i), second = read_weights(form, 1, w, o + j, i);
            bool mix = in_order && in_pairs(form);
            store(dense + i, mix ? shuffle(first, second, low) : first);
            store(dense + i + VL, mix ? shuffle(first, second, high) : second);
        }
        for (int64_t i = whole; i < w->inputs; i++) dense[i] = read_weight(form, w, o + j, i);
    }
}

void dense_weights(const Linear* w, int64_t o, int64_t count, float* dense) {
    if (w->form == BYTES) make_dense(BYTES, true, w, o, count, dense);
    else if (w->form == BF16) make_dense(BF16, true, w, o, count, dense);
    else make_dense(NIBBLES, true, w, o, count, dense);
}

// Nibbles cost more than others: of a few outputs they become float32 once for all rows, with the same sums.
static void dense_outputs(const Linear* w, Range columns, int64_t rows, Rows from, float* y, int64_t line, float* dense) {
    for (int64_t o = columns.begin; o < columns.end; o += NEAR_OUTPUTS) {
        int64_t count = columns.end - o < NEAR_OUTPUTS ? columns.end - o : NEAR_OUTPUTS;
        Linear units = {.form = OUTPUTS_FIRST, .inputs = w->inputs, .outputs = count, .weight = dense};
        make_dense(NIBBLES, false, w, o, count, dense);
        some_outputs(OUTPUTS_FIRST, &units, (Range){0, count}, rows, from, y + o, line);
    }
}

int64_t outputs_first_spare(const Linear* w, int64_t rows) {
    return (rows + (w->form == NIBBLES ? NEAR_OUTPUTS : 0)) * w->inputs;
}

// Nibbles in small groups become float32 first, which is read STEP at once.
static bool reads_float32(const Linear* w) { return w->form == NIBBLES && !whole_steps(NIBBLES, w); }

void pack_inputs(const Linear* w, int64_t rows, const float* x, int64_t x_line, float* spare) {
    pack_rows(in_pairs(w->form) && !reads_float32(w), w->inputs / STEP * STEP, rows, x, x_line, spare);
}

void outputs_first(const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y, int64_t line,
                   float* spare) {
    Rows from = {spare, x, x_line};
    if (w->form == OUTPUTS_FIRST) some_outputs(OUTPUTS_FIRST, w, columns, rows, from, y, line);
    else if (w->form == BYTES) some_outputs(BYTES, w, columns, rows, from, y, line);
    else if (w->form == BF16) some_outputs(BF16, w, columns, rows, from, y, line);
    else if (rows > TILE_ROWS || reads_float32(w)) dense_outputs(w, columns, rows, from, y, line, spare + rows * w->inputs);
    else some_outputs(NIBBLES, w, columns, rows, from, y, line);
}
