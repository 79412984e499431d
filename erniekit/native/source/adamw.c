// The update of weights by AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), in one pass over memory.
#include "simd.h"

// Update n weights and their moments m and v with their gradients, where beta^t is the power of a beta:
// w <- (1 - rate decay) w - rate sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + epsilon sqrt(1 - beta2^t)).
// Rate and powers are arrays of one number; the powers are those of this update and become those of the next.
void adamw(int64_t n, float* weight, const float* grad, float* m, float* v, const float* rate, float* power1,
           float* power2, float beta1, float beta2, float epsilon, float decay) {
    const float root = sqrtf(1.0f - *power2), step = *rate * root / (1.0f - *power1), floor = epsilon * root;
    const float kept = 1.0f - *rate * decay, other1 = 1.0f - beta1, other2 = 1.0f - beta2;
#pragma omp parallel for simd schedule(static) if (n > SMALL)
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i];
        m[i] = beta1 * m[i] + other1 * g;
        v[i] = beta2 * v[i] + other2 * g * g;
        weight[i] = kept * weight[i] - step * m[i] / (sqrtf(v[i]) + floor);
    }
    *power1 *= beta1;
    *power2 *= beta2;
}
