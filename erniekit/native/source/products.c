// Products of a step: of a few rows by a weight that is read once, here of those [in, out]; of many rows by MKL.
// Of few rows each number of y is one sum in one order, whatever the number of rows and of threads is.
// So sums of single numbers name fmaf: compilers fuse some of their loops, as those of vectors, and others not.
#include "products.h"

#define LINES 8            // of W [in, out] that pass a single row side by side
#define PANEL_LINES 64     // of W [in, out] that several rows meet before the next lines
#define PANEL_COLUMNS 512
#define STRIP 4            // vectors of a strip of a panel, which stays in the first cache
#define DENSE_OUTPUTS 64   // outputs that become float32 at once, for MKL
#define ALIGNED 16         // numbers of a line of the cache
#define TURNS 8            // in which each of a product's threads takes columns, about
#define LEAST_COLUMNS (4 * VL)
#if VL == 16
#define MOST_ROWS 6        // of sums in registers
#else
#define MOST_ROWS 3
#endif
enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };  // of cblas.h

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

// Multiply what units of bytes have summed.
static void scale_columns(const Linear* w, int64_t o, int64_t count, int64_t rows, float* y, int64_t line) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = o; j < o + count; j++) y[r * line + j] *= w->scales[j];
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
            dense_weights(w, o, count, dense);
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

static int64_t few(int64_t rows) { return rows < FEW_ROWS ? rows : FEW_ROWS; }

int64_t decode_spare(const Linear* w, int64_t rows) {
    int64_t narrow = FEW_ROWS * w->rank + ALIGNED;
    if (w->form == INPUTS_FIRST) return narrow;
    int64_t own = outputs_first_spare(w, few(rows)), dense = w->form == OUTPUTS_FIRST ? 0 : DENSE_OUTPUTS * w->inputs;
    return (own > dense ? own : dense) + narrow;
}

// Products of few rows, which x may have been packed for
static void few_rows(const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y, int64_t line,
                     float* spare) {
    if (w->form == INPUTS_FIRST) inputs_first(w, columns, rows, x, x_line, y, line);
    else outputs_first(w, columns, rows, x, x_line, y, line, spare);
}

static void scale_and_add_bias(const Linear* w, Range columns, int64_t rows, float* y, int64_t line) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = columns.begin; o < columns.end; o++) {
            if (w->column_scale) y[r * line + o] *= w->column_scale[o];
            if (w->bias) y[r * line + o] += w->bias[o];
        }
}

// Threads take columns as they come to them: those of a core that others use, too, or that is slower, take fewer.
static void take_columns(Team team, int number, const Linear* w, int64_t rows, const float* x, int64_t x_line, float* y,
                         int64_t line, float* spare) {
    int64_t unit = w->outputs / (TURNS * team.all * LEAST_COLUMNS) * LEAST_COLUMNS + LEAST_COLUMNS, begin;
    if (w->form != INPUTS_FIRST) pack_inputs(w, rows, x, x_line, spare);
    while ((begin = atomic_fetch_add(&team.meeting->next_column[number], (int)unit)) < w->outputs) {
        Range columns = {begin, begin + unit < w->outputs ? begin + unit : w->outputs};
        few_rows(w, columns, rows, x, x_line, y, line, spare);
        scale_and_add_bias(w, columns, rows, y, line);
    }
}

void decode_linear(Team team, int number, Sgemm* sgemm, const Linear* w, int64_t rows, const float* x, int64_t x_line,
                   float* y, int64_t line, float* spare) {
    spare = (float*)(((uintptr_t)spare + 4 * ALIGNED - 1) / (4 * ALIGNED) * (4 * ALIGNED));
    if (team.all > 1 && rows <= FEW_ROWS && !w->rank) {
        take_columns(team, number, w, rows, x, x_line, y, line, spare);
        return;
    }
    Range columns = share(team, w->outputs, 2 * VL);
    if (columns.begin == columns.end) return;
    if (rows > FEW_ROWS && sgemm) many_rows(sgemm, w, columns, rows, x, x_line, y, line, spare);
    else
        for (int64_t r = 0; r < rows; r += FEW_ROWS) {
            if (w->form != INPUTS_FIRST) pack_inputs(w, few(rows - r), x + r * x_line, x_line, spare);
            few_rows(w, columns, few(rows - r), x + r * x_line, x_line, y + r * line, line, spare);
        }
    if (w->rank) add_adapter(w, columns, rows, x, x_line, y, line, spare);
    scale_and_add_bias(w, columns, rows, y, line);
}

// One product outside of a step: y [rows, out] of x [rows, in]. spare: `spare_size` numbers for each thread.
void linear_product(Sgemm* sgemm, const Linear* w, int64_t rows, const float* x, float* y, int64_t threads,
                    int64_t spare_size, float* spare) {
    Meeting meeting = {0};
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Team team = {omp_get_thread_num(), omp_get_num_threads(), &meeting};
        decode_linear(team, 0, sgemm, w, rows, x, w->inputs, y, w->outputs, spare + team.me * spare_size);
    }
}

// The threads of such a product, and the numbers that each needs beside its arguments.
void linear_memory(const Linear* w, int64_t rows, int64_t* threads, int64_t* size) {
    *threads = rows * w->inputs * w->outputs < SMALL ? 1 : omp_get_max_threads();
    *size = (decode_spare(w, rows) + 31) / 32 * 32;  // threads write to lines of the cache of their own
}
