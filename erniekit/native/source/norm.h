// One row of RMSNorm: y = w r x with r = 1 / sqrt(mean(x^2) + epsilon).
#pragma once
#include "simd.h"

// Return r.
INLINE float norm_row(int64_t size, const float* x, const float* weight, float epsilon, float* y) {
    float r = 1.0f / sqrtf(dot(size, x, x) / (float)size + epsilon);
    int64_t i = 0;
    for (; i + VL <= size; i += VL) store(y + i, load(x + i) * splat(r) * load(weight + i));
    for (; i < size; i++) y[i] = x[i] * r * weight[i];
    return r;
}

// Return the sum of w g x; add r g x to grad_weight, unless that is NULL.
INLINE float add_row(int64_t size, const float* x, const float* weight, const float* grad, float r, float* grad_weight) {
    vf sums[2] = {{0}};
    float tail = 0.0f;
    int64_t i = 0;
    for (; i + 2 * VL <= size; i += 2 * VL)
        for (int j = 0; j < 2; j++) {
            int64_t at = i + j * VL;
            vf product = load(grad + at) * load(x + at);
            sums[j] += product * load(weight + at);
            if (grad_weight) store(grad_weight + at, load(grad_weight + at) + product * splat(r));
        }
    for (; i < size; i++) {
        float product = grad[i] * x[i];
        tail += product * weight[i];
        if (grad_weight) grad_weight[i] += product * r;
    }
    return sum_of(sums[0] + sums[1]) + tail;
}

// dx = r w g - x r^3 mean(w g x); r g x is added to grad_weight, unless that is NULL. grad_x may be grad.
INLINE void norm_row_backward(int64_t size, const float* x, const float* weight, float r, const float* grad,
                              float* grad_x, float* grad_weight) {
    float sum = grad_weight ? add_row(size, x, weight, grad, r, grad_weight) : add_row(size, x, weight, grad, r, 0);
    float along = r * r * r * sum / (float)size;
    int64_t i = 0;
    for (; i + VL <= size; i += VL)
        store(grad_x + i, load(grad + i) * load(weight + i) * splat(r) - load(x + i) * splat(along));
    for (; i < size; i++) grad_x[i] = grad[i] * weight[i] * r - x[i] * along;
}

// The gradient of the weight is a sum of `blocks` parts, each of consecutive rows, added up in their order: so its bits
// do not depend on the number of threads. The first part becomes the sum.
static inline void sum_parts(int64_t blocks, int64_t size, float* partial) {
    for (int64_t block = 1; block < blocks; block++)
        for (int64_t i = 0; i < size; i++) partial[i] += partial[block * size + i];
}
