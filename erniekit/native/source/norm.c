// RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467), rows of `size` channels, and its gradient.
#include "simd.h"

static float mean_square(int64_t size, const float* x) {
    vf sums[4] = {{0}};
    float tail = 0.0f;
    int64_t i = 0;
    for (; i + 4 * VL <= size; i += 4 * VL)
        for (int j = 0; j < 4; j++) sums[j] += load(x + i + j * VL) * load(x + i + j * VL);
    for (; i + VL <= size; i += VL) sums[0] += load(x + i) * load(x + i);
    for (; i < size; i++) tail += x[i] * x[i];
    return (sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail) / (float)size;
}

// y = w r x with r = 1 / sqrt(mean(x^2) + epsilon), which it keeps for the gradient. inverse_rms: [rows]
void rms_norm(int64_t rows, int64_t size, const float* x, const float* weight, float epsilon, float* y,
              float* inverse_rms) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float* in = x + row * size;
        float* out = y + row * size;
        float r = 1.0f / sqrtf(mean_square(size, in) + epsilon);
        inverse_rms[row] = r;
        int64_t i = 0;
        for (; i + VL <= size; i += VL) store(out + i, load(in + i) * splat(r) * load(weight + i));
        for (; i < size; i++) out[i] = in[i] * r * weight[i];
    }
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

// dx = r w g - x r^3 mean(w g x); dw = sum over rows of r g x, as a sum of `blocks` parts, each of consecutive rows:
// so its bits do not depend on the number of threads.
// partial: [blocks, size], zeros, of which the first row becomes dw; NULL where the weight is frozen.
void rms_norm_backward(int64_t rows, int64_t size, int64_t blocks, const float* x, const float* weight,
                       const float* inverse_rms, const float* grad, float* grad_x, float* partial) {
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t row = rows * block / blocks; row < rows * (block + 1) / blocks; row++) {
            const float *in = x + row * size, *g = grad + row * size;
            float r = inverse_rms[row], *out = grad_x + row * size;
            float sum = partial ? add_row(size, in, weight, g, r, partial + block * size)
                                : add_row(size, in, weight, g, r, 0);
            float along = r * r * r * sum / (float)size;
            int64_t i = 0;
            for (; i + VL <= size; i += VL)
                store(out + i, load(g + i) * load(weight + i) * splat(r) - load(in + i) * splat(along));
            for (; i < size; i++) out[i] = g[i] * weight[i] * r - in[i] * along;
        }
    if (partial)
        for (int64_t block = 1; block < blocks; block++)
            for (int64_t i = 0; i < size; i++) partial[i] += partial[block * size + i];
}
