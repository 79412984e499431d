// Softmax cross entropy of rows of logits, with its gradient by the logits.
#include "simd.h"

static float largest(int64_t n, const float* x) {
    vf peaks[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
        for (int j = 0; j < 4; j++) peaks[j] = larger(load(x + i + j * VL), peaks[j]);
    float peak = largest_of(larger(larger(peaks[0], peaks[1]), larger(peaks[2], peaks[3])));
    for (; i < n; i++) peak = x[i] > peak ? x[i] : peak;
    return peak;
}

// Return the sum of e^(x - peak); store the powers, unless `powers` is NULL. It may be x.
INLINE float sum_of_powers(int64_t n, const float* x, float peak, float* powers) {
    vf sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
        for (int j = 0; j < 4; j++) {
            vf power = exponential(load(x + i + j * VL) - splat(peak));
            sums[j] += power;
            if (powers) store(powers + i + j * VL, power);
        }
    for (; i < n; i += VL) {
        int count = n - i < VL ? (int)(n - i) : VL;
        vf power = exponential(load_part(x + i, count, -INFINITY) - splat(peak));
        sums[0] += power;
        if (powers) store_part(powers + i, power, count);
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static int is_first(int64_t column, const float* x) {  // of those that equal x[column]
    for (int64_t i = 0; i < column; i++)
        if (x[i] == x[column]) return 0;
    return 1;
}

// Per row -log P[target] with P = softmax(logits), whether the target's logit is the first of the largest ones, and
// the gradient weight (P - E), where E is 1 at the target and else 0. A target outside of the vocabulary gives NaN.
// logits, grad: [rows, vocabulary], may be the same memory; targets int64, weights, losses, is_correct: [rows].
// NULL: for grad and (losses, is_correct) it is not computed, for weights all are 1.
void cross_entropy(int64_t rows, int64_t vocabulary, const float* logits, const int64_t* targets, const float* weights,
                   float* losses, uint8_t* is_correct, float* grad) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float* x = logits + row * vocabulary;
        float* out = grad ? grad + row * vocabulary : 0;
        int64_t target = targets[row];
        int valid = target >= 0 && target < vocabulary;
        float peak = largest(vocabulary, x), at_target = valid ? x[target] : NAN;
        if (is_correct) is_correct[row] = at_target == peak && is_first(target, x);
        float total = out ? sum_of_powers(vocabulary, x, peak, out) : sum_of_powers(vocabulary, x, peak, 0);
        if (losses) losses[row] = peak - at_target + logf(total);
        if (!out) continue;
        float weight = weights ? weights[row] : 1.0f;
        multiply_by(vocabulary, weight / total, out);
        if (valid) out[target] -= weight;
    }
}
