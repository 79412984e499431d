// Long vectors: gradients of whole tensors.
#include "simd.h"

#define BLOCK 65536  // values whose squares a thread sums in float32; SQUARES_BLOCK of training/gradients.py

// The sum of squares of x, rounded once. parts: a number for each BLOCK, so that the bits do not depend on the number of
// threads.
void squared_norm(int64_t n, const float* x, double* parts, float* total) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (blocks > 1)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK, count = n - first < BLOCK ? n - first : BLOCK;
        parts[block] = dot(count, x + first, x + first);
    }
    double sum = 0.0;
    for (int64_t block = 0; block < blocks; block++) sum += parts[block];
    *total = (float)sum;
}

// x *= factor
void scale(int64_t n, float factor, float* x) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (blocks > 1)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK;
        multiply_by(n - first < BLOCK ? n - first : BLOCK, factor, x + first);
    }
}
