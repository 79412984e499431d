// Products of a few rows with a weight that is read once, whatever its form; those of many rows go to MKL.
// Each number of y is one sum in one order, whatever the number of rows and of threads is.
#include "decode.h"

#define LINES 8          // of W [in, out] that are read side by side
#define STEP (2 * VL)    // inputs that are read at once of W [out, in]
#define DENSE_OUTPUTS 64 // outputs whose codes become float32 at once, for MKL
#define NEAR_NUMBERS 8192  // of y, which stay in the first cache while lines of W pass
enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };  // of cblas.h

typedef int8_t bytes_VL __attribute__((vector_size(VL)));
typedef uint8_t codes_VL __attribute__((vector_size(VL)));

// y[r, o] += sum over k < count of x[r, k] w[k, o]
INLINE void add_lines(const int count, int64_t rows, int64_t width, const float* x, int64_t x_line, const float* w,
                      int64_t w_line, float* y, int64_t line) {
    int64_t o = 0;
    for (; o + VL <= width; o += VL) {
        vf lines[LINES];
#pragma GCC unroll 8
        for (int k = 0; k < count; k++) lines[k] = load(w + k * w_line + o);
        for (int64_t r = 0; r < rows; r++) {
            vf sum = load(y + r * line + o);
#pragma GCC unroll 8
            for (int k = 0; k < count; k++) sum += splat(x[r * x_line + k]) * lines[k];
            store(y + r * line + o, sum);
        }
    }
    for (; o < width; o++)
        for (int64_t r = 0; r < rows; r++)
            for (int k = 0; k < count; k++) y[r * line + o] += x[r * x_line + k] * w[k * w_line + o];
}

// W [in, out]: y stays near while the lines of W pass.
static void inputs_first(const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y,
                         int64_t line) {
    const float* weight = w->weight;
    int64_t width = NEAR_NUMBERS / rows / VL * VL;
    for (int64_t o = columns.begin; o < columns.end; o += width) {
        int64_t here = columns.end - o < width ? columns.end - o : width, i = 0;
        for (int64_t r = 0; r < rows; r++) memset(y + r * line + o, 0, sizeof(float) * here);
        for (; i + LINES <= w->inputs; i += LINES)
            add_lines(LINES, rows, here, x + i, x_line, weight + i * w->outputs + o, w->outputs, y + o, line);
        for (; i < w->inputs; i++)
            add_lines(1, rows, here, x + i, x_line, weight + i * w->outputs + o, w->outputs, y + o, line);
    }
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

INLINE float scale_at(const Linear* w, int64_t o, int64_t i) {
    return w->form == BYTES ? w->scales[o] : w->scales[o * (w->inputs / w->group) + i / w->group];
}

// STEP weights of output o from input i on; of nibbles first those of even inputs, then those of odd ones.
// Those of bytes still have to be multiplied by the scale.
INLINE void read_weights(const enum Form form, const Linear* w, int64_t o, int64_t i, vf* first, vf* second) {
    if (form == OUTPUTS_FIRST) {
        const float* from = (const float*)w->weight + o * w->inputs + i;
        *first = load(from), *second = load(from + VL);
    } else if (form == BYTES) {
        bytes_VL codes[2];
        memcpy(codes, (const int8_t*)w->weight + o * w->inputs + i, sizeof codes);
        *first = __builtin_convertvector(__builtin_convertvector(codes[0], vi), vf);
        *second = __builtin_convertvector(__builtin_convertvector(codes[1], vi), vf);
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

// The inputs that are read STEP at once; the rest one by one.
INLINE int64_t whole_steps(const Linear* w) {
    return w->form == NIBBLES && w->group % STEP ? 0 : w->inputs / STEP * STEP;
}

#define TILE 4  // rows, and outputs, of a tile of sums in registers
INLINE void tile(const enum Form form, const int rows, const int outputs, const Linear* w, int64_t o, const float* x,
                 int64_t x_line, float* y, int64_t line) {
    vf sums[TILE][TILE] = {0};
    int64_t whole = whole_steps(w);
    for (int64_t i = 0; i < whole; i += STEP)
#pragma GCC unroll 4
        for (int j = 0; j < outputs; j++) {
            vf first, second;
            read_weights(form, w, o + j, i, &first, &second);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                sums[r][j] += load(x + r * x_line + i) * first;
                sums[r][j] += load(x + r * x_line + i + VL) * second;
            }
        }
    for (int j = 0; j < outputs; j++)
        for (int r = 0; r < rows; r++) {
            float sum = sum_of(sums[r][j]);
            for (int64_t i = whole; i < w->inputs; i++) sum += x[r * x_line + i] * read_weight(form, w, o + j, i);
            y[r * line + o + j] = form == BYTES ? sum * w->scales[o + j] : sum;
        }
}

// W [out, in] in any form: tiles of rows and outputs.
INLINE void outputs_first(const enum Form form, const Linear* w, Range columns, int64_t rows, const float* x,
                          int64_t x_line, float* y, int64_t line) {
    int64_t o = columns.begin;
    for (; o + TILE <= columns.end; o += TILE) {
        int64_t r = 0;
        for (; r + TILE <= rows; r += TILE) tile(form, TILE, TILE, w, o, x + r * x_line, x_line, y + r * line, line);
        if (r + 2 <= rows) tile(form, 2, TILE, w, o, x + r * x_line, x_line, y + r * line, line), r += 2;
        if (r < rows) tile(form, 1, TILE, w, o, x + r * x_line, x_line, y + r * line, line);
    }
    for (; o < columns.end; o++)
        for (int64_t r = 0; r < rows; r++) tile(form, 1, 1, w, o, x + r * x_line, x_line, y + r * line, line);
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

static void few_rows(const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y,
                     int64_t line) {
    switch (w->form) {
        case INPUTS_FIRST: inputs_first(w, columns, rows, x, x_line, y, line); break;
        case OUTPUTS_FIRST: outputs_first(OUTPUTS_FIRST, w, columns, rows, x, x_line, y, line); break;
        case BYTES: outputs_first(BYTES, w, columns, rows, x, x_line, y, line); break;
        case NIBBLES: outputs_first(NIBBLES, w, columns, rows, x, x_line, y, line); break;
    }
}

// float32 weights [count, in] of quantized outputs from o on, in the order of split_pairs.
INLINE void make_dense(const enum Form form, const Linear* w, int64_t o, int64_t count, float* dense) {
    int64_t whole = whole_steps(w);
    for (int64_t j = 0; j < count; j++, dense += w->inputs) {
        vf scale = splat(form == BYTES ? w->scales[o + j] : 1.0f);
        for (int64_t i = 0; i < whole; i += STEP) {
            vf first, second;
            read_weights(form, w, o + j, i, &first, &second);
            store(dense + i, first * scale), store(dense + i + VL, second * scale);
        }
        for (int64_t i = whole; i < w->inputs; i++) dense[i] = read_weight(form, w, o + j, i) * scale[0];
    }
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
        }
}

// y[:, columns] += lora_scale (x A) B
static void add_adapter(const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y,
                        int64_t line, float* narrow) {
    Linear a = {.form = INPUTS_FIRST, .inputs = w->inputs, .outputs = w->rank, .weight = w->lora_a};
    for (int64_t r = 0; r < rows; r += FEW_ROWS) {
        int64_t few = rows - r < FEW_ROWS ? rows - r : FEW_ROWS;
        inputs_first(&a, (Range){0, w->rank}, few, x + r * x_line, x_line, narrow, w->rank);
        for (int64_t k = 0; k < few * w->rank; k++) narrow[k] *= w->lora_scale;
        for (int64_t k = 0; k < w->rank; k++)
            add_lines(1, few, columns.end - columns.begin, narrow + k, w->rank, w->lora_b + k * w->outputs + columns.begin,
                      w->outputs, y + r * line + columns.begin, line);
    }
}

int64_t decode_spare(const Linear* w, int64_t rows) {
    int64_t split = w->form == NIBBLES ? rows * w->inputs : 0;
    int64_t dense = w->form == BYTES || w->form == NIBBLES ? DENSE_OUTPUTS * w->inputs : 0;
    return split + dense + FEW_ROWS * w->rank;
}

void decode_linear(Team team, Sgemm* sgemm, const Linear* w, int64_t rows, const float* x, int64_t x_line, float* y,
                   int64_t line, float* spare) {
    Range columns = share(team, w->outputs, 4 * VL);
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
                     line);
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
