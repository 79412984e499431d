// Products of a few rows with a weight that is read once, whatever its form; those of many rows go to MKL.
// Of few rows each number of y is one sum in one order, whatever the number of rows and of threads is.
// So sums of single numbers name fmaf: compilers fuse some of their loops, as those of vectors, and others not.
#include <stdbool.h>

#include "decode.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LINES 8            // of W [in, out] that pass a single row side by side
#define PANEL_LINES 64     // of W [in, out] that several rows meet before the next lines
#define PANEL_COLUMNS 512
#define STRIP 4            // vectors of a strip of a panel, which stays in the first cache
#define STEP (2 * VL)      // inputs that are read at once of W [out, in]
#define DENSE_OUTPUTS 64   // outputs whose codes become float32 at once, for MKL
#define NEAR_OUTPUTS 8     // the same for products of our own, so that they stay in a near cache
#if VL == 16
#define MOST_ROWS 6        // of sums in registers
#else
#define MOST_ROWS 3
#endif
#define TILE_ROWS (VL / 4) // of sums in registers where W is [out, in], with 4 outputs; of fewer rows 2 with VL / 2
enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };  // of cblas.h

typedef int8_t bytes_VL __attribute__((vector_size(VL)));
typedef uint8_t codes_VL __attribute__((vector_size(VL)));

// y += x W of a single row: y stays near while `count` lines of W pass side by side.
INLINE void add_lines(const int count, int64_t width, const float* x, const float* w, int64_t w_line, float* y) {
    int64_t o = 0;
    for (; o + VL <= width; o += VL) {
        vf sum = load(y + o);
#pragma GCC unroll 8
        for (int k = 0; k < count; k++) sum += splat(x[k]) * load(w + k * w_line + o);
        store(y + o, sum);
    }
    for (; o < width; o++)
        for (int k = 0; k < count; k++) y[o] = fmaf(x[k], w[k * w_line + o], y[o]);
}

// y += x W of `rows` rows and `vectors` vectors of columns, sums in registers. Of what comes next, `asked` vectors of each
// line are asked for.
INLINE void add_strip(const int rows, const int vectors, int64_t lines, const float* x, int64_t x_line, const float* w,
                      int64_t w_line, float* y, int64_t line, const int asked, const float* next, int64_t next_line) {
    vf sums[MOST_ROWS][STRIP];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = load(y + r * line + v * VL);
    for (int64_t k = 0; k < lines; k++, w += w_line, next += next_line) {
        vf weights[STRIP];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            weights[v] = load(w + v * VL);
            if (v < asked) __builtin_prefetch(next + v * VL);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vf own = splat(x[r * x_line + k]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[r][v] += own * weights[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(y + r * line + v * VL, sums[r][v]);
}

// The same of fewer rows than MOST_ROWS.
INLINE void add_rest(const int vectors, int64_t lines, int64_t rows, const float* x, int64_t x_line, const float* w,
                     int64_t w_line, float* y, int64_t line, const int asked, const float* next, int64_t next_line) {
    switch (rows) {
        case 1: add_strip(1, vectors, lines, x, x_line, w, w_line, y, line, asked, next, next_line); break;
        case 2: add_strip(2, vectors, lines, x, x_line, w, w_line, y, line, asked, next, next_line); break;
        case 3: add_strip(3, vectors, lines, x, x_line, w, w_line, y, line, asked, next, next_line); break;
        case 4: add_strip(4, vectors, lines, x, x_line, w, w_line, y, line, asked, next, next_line); break;
        case 5: add_strip(5, vectors, lines, x, x_line, w, w_line, y, line, asked, next, next_line); break;
    }
}

// The same of any number of rows; the first of them ask for the lines that come next.
INLINE void add_rows(const int vectors, int64_t lines, int64_t rows, const float* x, int64_t x_line, const float* w,
                     int64_t w_line, float* y, int64_t line) {
    const float* next = w + PANEL_LINES * w_line;
    if (rows < MOST_ROWS) {
        add_rest(vectors, lines, rows, x, x_line, w, w_line, y, line, vectors, next, w_line);
        return;
    }
    add_strip(MOST_ROWS, vectors, lines, x, x_line, w, w_line, y, line, vectors, next, w_line);
    for (rows -= MOST_ROWS; rows > 0; rows -= MOST_ROWS) {
        x += MOST_ROWS * x_line, y += MOST_ROWS * line;
        if (rows >= MOST_ROWS) add_strip(MOST_ROWS, vectors, lines, x, x_line, w, w_line, y, line, 0, w, 0);
        else add_rest(vectors, lines, rows, x, x_line, w, w_line, y, line, 0, w, 0);
    }
}

// The same of a strip for many rows, copied to where no two lines share a place of the first cache. The first rows ask
// for `asked` vectors each of the lines of the next strip, since all of them at once would have to wait.
INLINE void add_many_rows(int64_t lines, int64_t rows, const float* x, int64_t x_line, const float* w, int64_t w_line,
                          float* y, int64_t line, const int asked, const float* next) {
    float copied[PANEL_LINES * STRIP * VL] __attribute__((aligned(64)));
    for (int64_t k = 0; k < lines; k++)
        for (int v = 0; v < STRIP; v++) store(copied + (k * STRIP + v) * VL, load(w + k * w_line + v * VL));
    for (int v = 0; rows >= MOST_ROWS; rows -= MOST_ROWS, x += MOST_ROWS * x_line, y += MOST_ROWS * line, v += asked) {
        if (v < STRIP)
            add_strip(MOST_ROWS, STRIP, lines, x, x_line, copied, STRIP * VL, y, line, asked, next + v * VL, w_line);
        else add_strip(MOST_ROWS, STRIP, lines, x, x_line, copied, STRIP * VL, y, line, 0, copied, 0);
    }
    add_rest(STRIP, lines, rows, x, x_line, copied, STRIP * VL, y, line, 0, copied, 0);
}

static void add_panel(int64_t lines, int64_t width, int64_t rows, const float* x, int64_t x_line, const float* w,
                      int64_t w_line, float* y, int64_t line) {
    int64_t o = 0;
    for (; o + STRIP * VL <= width; o += STRIP * VL) {
        const float* next = o + 2 * STRIP * VL > width ? w + PANEL_LINES * w_line : w + o + STRIP * VL;
        if (rows >= STRIP * MOST_ROWS) add_many_rows(lines, rows, x, x_line, w + o, w_line, y + o, line, 1, next);
        else if (rows >= 2 * MOST_ROWS) add_many_rows(lines, rows, x, x_line, w + o, w_line, y + o, line, 2, next);
        else if (rows > MOST_ROWS) add_many_rows(lines, rows, x, x_line, w + o, w_line, y + o, line, 4, next);
        else add_rows(STRIP, lines, rows, x, x_line, w + o, w_line, y + o, line);
    }
    if (o + 2 * VL <= width) {
        add_rows(2, lines, rows, x, x_line, w + o, w_line, y + o, line);
        o += 2 * VL;
    }
    for (; o + VL <= width; o += VL) add_rows(1, lines, rows, x, x_line, w + o, w_line, y + o, line);
    for (; o < width; o++)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < lines; k++) y[r * line + o] = fmaf(x[r * x_line + k], w[k * w_line + o], y[r * line + o]);
}

// y += x W for W [in, out], some columns of it
static void add_product(int64_t inputs, int64_t width, int64_t rows, const float* x, int64_t x_line, const float* w,
                        int64_t w_line, float* y, int64_t line) {
    int64_t i = 0;
    if (rows == 1) {
        for (; i + LINES <= inputs; i += LINES) add_lines(LINES, width, x + i, w + i * w_line, w_line, y);
        for (; i < inputs; i++) add_lines(1, width, x + i, w + i * w_line, w_line, y);
        return;
    }
    for (int64_t o = 0; o < width; o += PANEL_COLUMNS) {
        int64_t here = width - o < PANEL_COLUMNS ? width - o : PANEL_COLUMNS;
        for (i = 0; i < inputs; i += PANEL_LINES) {
            int64_t lines = inputs - i < PANEL_LINES ? inputs - i : PANEL_LINES;
            add_panel(lines, here, rows, x + i, x_line, w + i * w_line + o, w_line, y + o, line);
        }
    }
}

static void inputs_first(const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y,
                         int64_t line) {
    int64_t width = columns.end - columns.begin;
    for (int64_t r = 0; r < rows; r++) memset(y + r * line + columns.begin, 0, sizeof(float) * width);
    add_product(w->inputs, width, rows, x, x_line, (const float*)w->weight + columns.begin, w->outputs, y + columns.begin, line);
}

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

// STEP weights of output o from input i on; of nibbles first those of even inputs, then those of odd ones.
// Those of bytes still have to be multiplied by the scale.
INLINE void read_weights(const enum Form form, const Linear* w, int64_t o, int64_t i, vf* first, vf* second) {
    if (form == OUTPUTS_FIRST) {
        const float* from = (const float*)w->weight + o * w->inputs + i;
        *first = load(from), *second = load(from + VL);
    } else if (form == BYTES) {
        const int8_t* from = (const int8_t*)w->weight + o * w->inputs + i;
        *first = from_bytes(from), *second = from_bytes(from + VL);
    } else {
        codes_VL codes;
        memcpy(&codes, (const uint8_t*)w->weight + (o * w->inputs + i) / 2, sizeof codes);
        vf scale = splat(scale_at(w, o, i));
        *first = sixteen_levels(w->levels, codes & 15) * scale;
        *second = sixteen_levels(w->levels, codes >> 4) * scale;
    }
}

INLINE float read_weight(const enum Form form, const Linear* w, int64_t o, int64_t i) {
    if (form == OUTPUTS_FIRST) return ((const float*)w->weight)[o * w->inputs + i];
    if (form == BYTES) return ((const int8_t*)w->weight)[o * w->inputs + i];
    uint8_t codes = ((const uint8_t*)w->weight)[(o * w->inputs + i) / 2];
    return w->levels[i % 2 ? codes >> 4 : codes & 15] * scale_at(w, o, i);
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
INLINE int64_t whole_steps(const Linear* w) {
    return w->form == NIBBLES && w->group % STEP ? 0 : w->inputs / STEP * STEP;
}

// Of the next outputs, those from `ask` up to `asked` have their weights asked for.
INLINE void tile(const enum Form form, const int rows, const int outputs, const int ask, const int asked, const Linear* w,
                 int64_t o, const float* x, int64_t x_line, float* y, int64_t line) {
    vf sums[VL] = {0};
    int64_t whole = whole_steps(w);
    for (int64_t i = 0; i < whole; i += STEP) {
        vf own[TILE_ROWS][2];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) own[r][0] = load(x + r * x_line + i), own[r][1] = load(x + r * x_line + i + VL);
#pragma GCC unroll 8
        for (int j = 0; j < outputs; j++) {
            vf first, second;
            read_weights(form, w, o + j, i, &first, &second);
            if (j >= ask && j < asked) {
                const float* next = (const float*)w->weight + (o + j + outputs) * w->inputs + i;
                __builtin_prefetch(next), __builtin_prefetch(next + VL);
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r * outputs + j] += own[r][0] * first;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r * outputs + j] += own[r][1] * second;
        }
    }
    vf together = sums_of(sums);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < outputs; j++) {
            float sum = together[r * outputs + j];
            for (int64_t i = whole; i < w->inputs; i++) sum = fmaf(x[r * x_line + i], read_weight(form, w, o + j, i), sum);
            y[r * line + o + j] = form == BYTES ? sum * w->scales[o + j] : sum;
        }
}

// `parts` tiles of rows, each of which asks for a part of the next outputs: all at once would have to wait.
INLINE void asking_tiles(const enum Form form, const int parts, const int outputs, const Linear* w, int64_t o, const float* x,
                         int64_t x_line, float* y, int64_t line) {
#pragma GCC unroll 4
    for (int part = 0; part < parts; part++, x += TILE_ROWS * x_line, y += TILE_ROWS * line)
        tile(form, TILE_ROWS, outputs, part * outputs / parts, (part + 1) * outputs / parts, w, o, x, x_line, y, line);
}

// `outputs` of all rows, from o on
INLINE void tiles(const enum Form form, const int outputs, const Linear* w, int64_t o, int64_t rows, const float* x,
                  int64_t x_line, float* y, int64_t line) {
    if (outputs * TILE_ROWS <= VL) {
        if (form == OUTPUTS_FIRST && rows > TILE_ROWS) {
            int parts = rows >= 4 * TILE_ROWS ? 4 : rows >= 2 * TILE_ROWS ? 2 : 1;
            if (parts == 4) asking_tiles(form, 4, outputs, w, o, x, x_line, y, line);
            else if (parts == 2) asking_tiles(form, 2, outputs, w, o, x, x_line, y, line);
            else asking_tiles(form, 1, outputs, w, o, x, x_line, y, line);
            rows -= parts * TILE_ROWS, x += parts * TILE_ROWS * x_line, y += parts * TILE_ROWS * line;
        }
        for (; rows >= TILE_ROWS; rows -= TILE_ROWS, x += TILE_ROWS * x_line, y += TILE_ROWS * line)
            tile(form, TILE_ROWS, outputs, 0, 0, w, o, x, x_line, y, line);
    }
    if (VL == 16 && rows >= 2) {
        tile(form, 2, outputs, 0, 0, w, o, x, x_line, y, line);
        rows -= 2, x += 2 * x_line, y += 2 * line;
    }
    if (rows) tile(form, 1, outputs, 0, 0, w, o, x, x_line, y, line);
}

// W [out, in] in any form
INLINE void outputs_first(const enum Form form, const Linear* w, Range columns, int64_t rows, const float* x,
                          int64_t x_line, float* y, int64_t line) {
    int64_t o = columns.begin;
    if (rows < TILE_ROWS)
        for (; o + VL / 2 <= columns.end; o += VL / 2) tiles(form, VL / 2, w, o, rows, x, x_line, y, line);
    for (; o + 4 <= columns.end; o += 4) tiles(form, 4, w, o, rows, x, x_line, y, line);
    for (; o < columns.end; o++) tiles(form, 1, w, o, rows, x, x_line, y, line);
}

// Inputs in the order in which nibbles are read: of every STEP first the even ones, then the odd ones.
static void split_pairs(const Linear* w, int64_t rows, const float* x, int64_t x_line, float* split) {
    int64_t whole = whole_steps(w);
    for (int64_t r = 0; r < rows; r++, x += x_line, split += w->inputs) {
        for (int64_t i = 0; i < whole; i += STEP)
            for (int k = 0; k < VL; k++) split[i + k] = x[i + 2 * k], split[i + VL + k] = x[i + 2 * k + 1];
        memcpy(split + whole, x + whole, sizeof(float) * (w->inputs - whole));
    }
}

// float32 weights [count, in] of quantized outputs from o on, in the order of split_pairs; those of bytes in units of the
// scale.
INLINE void make_dense(const enum Form form, const Linear* w, int64_t o, int64_t count, float* dense) {
    int64_t whole = whole_steps(w);
    for (int64_t j = 0; j < count; j++, dense += w->inputs) {
        for (int64_t i = 0; i < whole; i += STEP) {
            vf first, second;
            read_weights(form, w, o + j, i, &first, &second);
            store(dense + i, first), store(dense + i + VL, second);
        }
        for (int64_t i = whole; i < w->inputs; i++) dense[i] = read_weight(form, w, o + j, i);
    }
}

// Multiply what `units` of bytes have summed.
static void scale_columns(const Linear* w, int64_t o, int64_t count, int64_t rows, float* y, int64_t line) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = o; j < o + count; j++) y[r * line + j] *= w->scales[j];
}

// Codes of a few outputs become float32 once for all rows; each sum is as it is without.
INLINE void dense_outputs(const enum Form form, const Linear* w, Range columns, int64_t rows, const float* x,
                          int64_t x_line, float* y, int64_t line, float* dense) {
    for (int64_t o = columns.begin; o < columns.end; o += NEAR_OUTPUTS) {
        int64_t count = columns.end - o < NEAR_OUTPUTS ? columns.end - o : NEAR_OUTPUTS;
        Linear units = {.form = OUTPUTS_FIRST, .inputs = w->inputs, .outputs = count, .weight = dense};
        make_dense(form, w, o, count, dense);
        outputs_first(OUTPUTS_FIRST, &units, (Range){0, count}, rows, x, x_line, y + o, line);
        if (form == BYTES) scale_columns(w, o, count, rows, y, line);
    }
}

static void few_rows(const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y,
                     int64_t line, float* dense) {
    // For one row, too, where codes are read one by one: that would be another order of sums.
    bool once = rows > TILE_ROWS || !whole_steps(w);
    if (w->form == INPUTS_FIRST) inputs_first(w, columns, rows, x, x_line, y, line);
    else if (w->form == OUTPUTS_FIRST) outputs_first(OUTPUTS_FIRST, w, columns, rows, x, x_line, y, line);
    else if (w->form == BYTES && once) dense_outputs(BYTES, w, columns, rows, x, x_line, y, line, dense);
    else if (w->form == BYTES) outputs_first(BYTES, w, columns, rows, x, x_line, y, line);
    else if (once) dense_outputs(NIBBLES, w, columns, rows, x, x_line, y, line, dense);
    else outputs_first(NIBBLES, w, columns, rows, x, x_line, y, line);
}

static void many_rows(Sgemm* sgemm, const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y,
                      int64_t line, float* dense) {
    int width = (int)(columns.end - columns.begin), inputs = (int)w->inputs;
    const float* weight = w->weight;
    if (w->form == INPUTS_FIRST)
        sgemm(ROW_MAJOR, AS_IT_IS, AS_IT_IS, (int)rows, width, inputs, 1.0f, x, (int)x_line, weight + columns.begin,
              (int)w->outputs, 0.0f, y + columns.begin, (int)line);
    else if (w->form == OUTPUTS_FIRST)
        sgemm(ROW_MAJOR, AS_IT_IS, TRANSPOSED, (int)rows, width, inputs, 1.0f, x, (int)x_line,
              weight + columns.begin * w->inputs, inputs, 0.0f, y + columns.begin, (int)line);
    else
        for (int64_t o = columns.begin; o < columns.end; o += DENSE_OUTPUTS) {
            int64_t count = columns.end - o < DENSE_OUTPUTS ? columns.end - o : DENSE_OUTPUTS;
            if (w->form == BYTES) make_dense(BYTES, w, o, count, dense);
            else make_dense(NIBBLES, w, o, count, dense);
            sgemm(ROW_MAJOR, AS_IT_IS, TRANSPOSED, (int)rows, (int)count, inputs, 1.0f, x, (int)x_line, dense, inputs, 0.0f,
                  y + o, (int)line);
            if (w->form == BYTES) scale_columns(w, o, count, rows, y, line);
        }
}

// y[:, columns] += lora_scale (x A) B
static void add_adapter(const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y,
                        int64_t line, float* narrow) {
    Linear a = {.form = INPUTS_FIRST, .inputs = w->inputs, .outputs = w->rank, .weight = w->lora_a};
    int64_t width = columns.end - columns.begin;
    for (int64_t r = 0; r < rows; r += FEW_ROWS) {
        int64_t few = rows - r < FEW_ROWS ? rows - r : FEW_ROWS;
        inputs_first(&a, (Range){0, w->rank}, few, x + r * x_line, x_line, narrow, w->rank);
        for (int64_t k = 0; k < few * w->rank; k++) narrow[k] *= w->lora_scale;
        add_product(w->rank, width, few, narrow, w->rank, w->lora_b + columns.begin, w->outputs,
                    y + r * line + columns.begin, line);
    }
}

int64_t decode_spare(const Linear* w, int64_t rows) {
    int64_t split = w->form == NIBBLES ? rows * w->inputs : 0;
    int64_t dense = w->form == BYTES || w->form == NIBBLES ? DENSE_OUTPUTS * w->inputs : 0;
    return split + dense + FEW_ROWS * w->rank;
}

void decode_linear(Team team, Sgemm* sgemm, const Linear* w, int64_t rows, const float* x, int64_t x_line, float* y,
                   int64_t line, float* spare) {
    Range columns = share(team, w->outputs, 2 * VL);
    if (columns.begin == columns.end) return;
    const float *read = x;
    int64_t read_line = x_line;
    if (w->form == NIBBLES) {
        split_pairs(w, rows, x, x_line, spare);
        read = spare, read_line = w->inputs, spare += rows * w->inputs;
    }
    if (rows > FEW_ROWS && sgemm) {
        many_rows(sgemm, w, columns, rows, read, read_line, y, line, spare);
    } else {
        for (int64_t r = 0; r < rows; r += FEW_ROWS)
            few_rows(w, columns, rows - r < FEW_ROWS ? rows - r : FEW_ROWS, read + r * read_line, read_line, y + r * line,
                     line, spare);
    }
    if (w->rank) add_adapter(w, columns, rows, x, x_line, y, line, spare);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = columns.begin; o < columns.end; o++) {
            if (w->column_scale) y[r * line + o] *= w->column_scale[o];
            if (w->bias) y[r * line + o] += w->bias[o];
        }
}

// For tests: one product by one thread.
void decode_product(Sgemm* sgemm, const Linear* w, int64_t rows, const float* x, float* y, float* spare) {
    Meeting meeting = {0};
    decode_linear((Team){0, 1, &meeting}, sgemm, w, rows, x, w->inputs, y, w->outputs, spare);
}
void decode_spare_size(const Linear* w, int64_t rows, int64_t* size) { *size = decode_spare(w, rows); }
