// Long vectors: gradients of whole tensors.
#include "simd.h"

#define BLOCK 65536 // values whose squares a thread sums in float32

static float squares(int64_t n, const float* x) {
    vf sums[4] = {{0}};
    float tail = 0.0f;
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
        for (int j = 0; j < 4; j++) sums[j] += load(x + i + j * VL) * load(x + i + j * VL);
    for (; i < n; i++) tail += x[i] * x[i];
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail;
}

// The sum of squares of x, rounded once. parts: [(n + 65535) / 65536], so that the bits do not depend on the number of
// threads.
void squared_norm(int64_t n, const float* x, double* parts, float* total) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK, count = n - first < BLOCK ? n - first : BLOCK;
        parts[block] = squares(count, x + first);
    }
    double sum = 0.0;
    for (int64_t block = 0; block < blocks; block++) sum += parts[block];
    *total = (float)sum;
}

// x *= factor
void scale(int64_t n, float factor, float* x) {
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < (n + BLOCK - 1) / BLOCK; block++) {
        int64_t i = block * BLOCK, end = n - i < BLOCK ? n : i + BLOCK;
        for (; i + VL <= end; i += VL) store(x + i, load(x + i) * splat(factor));
        for (; i < end; i++) x[i] *= factor;
    }
}
