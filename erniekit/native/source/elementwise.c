// Elementwise functions and their gradients, fused: one pass over memory.
#include "simd.h"

// y = silu(gate) up, elementwise (Shazeer, 2020, arXiv:2002.05202)
void swiglu_forward(int64_t n, const float* gate, const float* up, float* y) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n / VL; i++) {
        vf g = load(gate + i * VL);
        store(y + i * VL, g * sigmoid(g) * load(up + i * VL));
    }
    for (int64_t i = n / VL * VL; i < n; i++) y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}
