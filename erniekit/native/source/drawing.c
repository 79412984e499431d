// Draws of tokens by the probabilities of rows of logits, in float64.
#include "simd.h"
#include "threads.h"

#define LANES (VL / 2)
#define PART 64  // columns whose weights are summed before the row's sum is

typedef double vd __attribute__((vector_size(8 * LANES)));
typedef int64_t vl __attribute__((vector_size(8 * LANES)));
typedef float vh __attribute__((vector_size(4 * LANES)));

INLINE vd splat_double(double x) { return x - (vd){0}; }

// e^x for x <= 0 by x = n ln 2 + r and a rational function of r (Cephes' coefficients); below -708: 0.
INLINE vd exponential_double(vd x) {
    const vd magic = splat_double(6755399441055744.0);  // 1.5 * 2^52: adding it rounds to an integer
    vl tiny = x < splat_double(-708.0);
    x = (vd)(((vl)x & ~tiny) | ((vl)splat_double(-708.0) & tiny));
    vd shifted = x * splat_double(1.4426950408889634) + magic, n = shifted - magic;
    vd r = x - n * splat_double(6.93145751953125e-1);
    r = r - n * splat_double(1.42860682030941723212e-6);
    vd square = r * r;
    vd p = r * ((splat_double(1.26177193074810590878e-4) * square + splat_double(3.02994407707441961300e-2)) * square
                + splat_double(1.0));
    vd q = ((splat_double(3.00198505138664455042e-6) * square + splat_double(2.52448340349684104192e-3)) * square
            + splat_double(2.27265548208155028766e-1)) * square + splat_double(2.0);
    vd y = splat_double(1.0) + splat_double(2.0) * p / (q - p);
    vl power = ((vl)shifted - (vl)magic) << 52;
    return (vd)(((vl)y + power) & ~tiny);
}

// How a logit becomes a weight: e^((logit / divisor - peak) / temperature), logit / divisor in float32.
typedef struct { float divisor; double peak, temperature; } Weighing;

INLINE vd weights_of(vh logits, Weighing how) {
    vh divided = logits / (how.divisor - (vh){0});
    return exponential_double((__builtin_convertvector(divided, vd) - splat_double(how.peak)) / splat_double(how.temperature));
}

// The weights of up to PART columns, with zeros behind them; return their sum.
static double weigh_part(int64_t count, const float* logits, Weighing how, double* weights) {
    float padded[PART];
    for (int64_t i = count; i < PART; i++) padded[i] = -INFINITY;
    memcpy(padded, logits, sizeof(float) * count);
    vd sums = splat_double(0.0);
    for (int i = 0; i < PART; i += LANES) {
        vh own;
        memcpy(&own, padded + i, sizeof own);
        vd found = weights_of(own, how);
        memcpy(weights + i, &found, sizeof found);
        sums += found;
    }
    double sum = 0.0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}

static int64_t part_of_row(int64_t columns, int64_t begin) { return columns - begin < PART ? columns - begin : PART; }

static double weigh_row(int64_t columns, const float* logits, Weighing how) {
    double sum = 0.0, weights[PART];
    for (int64_t i = 0; i < columns; i += PART) sum += weigh_part(part_of_row(columns, i), logits + i, how, weights);
    return sum;
}

// The first column that, with those before it, has more than `place` of the row's weights; if rounding leaves none, the
// last one that has any.
static int64_t column_at(int64_t columns, const float* logits, Weighing how, double place) {
    double sum = 0.0, before = 0.0, weights[PART];
    int64_t last = 0;
    for (int64_t i = 0; i < columns && sum <= place; i += PART) {
        double part = weigh_part(part_of_row(columns, i), logits + i, how, weights);
        if (part > 0.0) last = i, before = sum;
        sum += part;
    }
    int64_t count = part_of_row(columns, last), found = last;
    weigh_part(count, logits + last, how, weights);
    for (int64_t i = 0; i < count && before <= place; i++) {
        if (weights[i] > 0.0) found = last + i;
        before += weights[i];
    }
    return found;
}

// tokens [R], each drawn by its row's temperature with a share of [0, 1); logps [R], of logits [R, V] that are divided by
// `divisors` in float32. Rows that are not finite give anything.
void draw_tokens(int64_t rows, int64_t columns, const float* logits, const double* temperatures, const float* divisors,
                 const double* shares, int64_t* tokens, double* logps) {
#pragma omp parallel for schedule(static) if (rows * columns > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = logits + r * columns;
        float peak = row[0];
        for (int64_t i = 0; i < columns; i++) peak = row[i] > peak ? row[i] : peak;
        Weighing drawn = {1.0f, peak, temperatures[r]}, shown = {divisors[r], peak / divisors[r], 1.0};
        double sum = weigh_row(columns, row, drawn);
        tokens[r] = column_at(columns, row, drawn, shares[r] * sum);
        if (temperatures[r] != 1.0) sum = weigh_row(columns, row, shown);
        logps[r] = (double)(row[tokens[r]] / divisors[r]) - shown.peak - log(sum);
    }
}
