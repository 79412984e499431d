// What joins gate and up in a gated feed-forward network (Shazeer, 2020, arXiv:2002.05202), and its gradients:
// elementwise functions of gate, up and the gradient of their joint output, all of n values.
#include "simd.h"

int omp_get_thread_num(void);  // of omp.h, which not every compiler comes with
int omp_get_num_threads(void);

#define SMALL 16384  // values below which waking other threads takes longer than the work

typedef struct { int64_t begin, end; } Range;

typedef struct { vf gate, up; } Gradients;

typedef vf (*Forward)(vf gate, vf up);
typedef Gradients (*Backward)(vf gate, vf up, vf grad);

// The values of the calling thread, a multiple of VL but for the last thread.
static Range share(int64_t n) {
    int64_t vectors = (n + VL - 1) / VL, threads = omp_get_num_threads(), own = omp_get_thread_num();
    int64_t end = vectors * (own + 1) / threads * VL;
    return (Range){vectors * own / threads * VL, end < n ? end : n};
}

INLINE void join(Range r, const float* gate, const float* up, float* y, Forward function) {
    int64_t i = r.begin;
    for (; i + VL <= r.end; i += VL) store(y + i, function(load(gate + i), load(up + i)));
    int rest = (int)(r.end - i);
    if (rest) store_part(y + i, function(load_part(gate + i, rest, 0.0f), load_part(up + i, rest, 0.0f)), rest);
}

INLINE void differentiate(Range r, const float* gate, const float* up, const float* grad, float* gate_grad,
                          float* up_grad, Backward function) {
    int64_t i = r.begin;
    for (; i + VL <= r.end; i += VL) {
        Gradients d = function(load(gate + i), load(up + i), load(grad + i));
        store(gate_grad + i, d.gate);
        store(up_grad + i, d.up);
    }
    int rest = (int)(r.end - i);
    if (!rest) return;
    Gradients d = function(load_part(gate + i, rest, 0.0f), load_part(up + i, rest, 0.0f), load_part(grad + i, rest, 0.0f));
    store_part(gate_grad + i, d.gate, rest);
    store_part(up_grad + i, d.up, rest);
}

// silu(gate) up, with s = sigmoid(gate) and silu(gate) = gate s
INLINE vf swiglu(vf gate, vf up) { return gate * sigmoid(gate) * up; }

// d silu = s + silu (1 - s)
INLINE Gradients swiglu_gradients(vf gate, vf up, vf grad) {
    vf s = sigmoid(gate), silu = gate * s;
    return (Gradients){(s + silu * (splat(1.0f) - s)) * up * grad, grad * silu};
}

// gelu(gate) up with the tanh approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415):
// gate (1 + tanh z) / 2 = gate sigmoid(2 z), z = sqrt(2 / pi) (gate + 0.044715 gate^3)
#define TWICE_ROOT 1.5957691216f
#define CUBIC 0.044715f
INLINE vf tanh_gate(vf gate) { return sigmoid(splat(TWICE_ROOT) * gate * (splat(1.0f) + splat(CUBIC) * gate * gate)); }
INLINE vf geglu(vf gate, vf up) { return gate * tanh_gate(gate) * up; }
INLINE Gradients geglu_gradients(vf gate, vf up, vf grad) {
    vf s = tanh_gate(gate), gelu = gate * s;
    vf slope = splat(TWICE_ROOT) * (splat(1.0f) + splat(3.0f * CUBIC) * gate * gate);
    return (Gradients){(s + gelu * (splat(1.0f) - s) * slope) * up * grad, grad * gelu};
}

// gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up in [-7, 7], as in GPT-OSS; no gradient beyond
#define LIMIT 7.0f
#define SHARPNESS 1.702f
INLINE vf clamped(vf gate, vf up) {
    gate = smaller(splat(LIMIT), gate);  // in this order NaN passes
    up = larger(splat(-LIMIT), smaller(splat(LIMIT), up));
    return gate * sigmoid(splat(SHARPNESS) * gate) * (up + splat(1.0f));
}
INLINE Gradients clamped_gradients(vf gate, vf up, vf grad) {
    vi gate_passes = gate <= splat(LIMIT), up_passes = (up <= splat(LIMIT)) & (up >= splat(-LIMIT));
    gate = smaller(splat(LIMIT), gate);
    up = larger(splat(-LIMIT), smaller(splat(LIMIT), up));
    vf s = sigmoid(splat(SHARPNESS) * gate), swish = gate * s, zero = splat(0.0f);
    vf slope = s + splat(SHARPNESS) * swish * (splat(1.0f) - s);
    return (Gradients){choose(gate_passes, slope * (up + splat(1.0f)) * grad, zero), choose(up_passes, grad * swish, zero)};
}

void swiglu_forward(int64_t n, const float* gate, const float* up, float* y) {
#pragma omp parallel if (n > SMALL)
    join(share(n), gate, up, y, swiglu);
}

void swiglu_backward(int64_t n, const float* gate, const float* up, const float* grad, float* gate_grad, float* up_grad) {
#pragma omp parallel if (n > SMALL)
    differentiate(share(n), gate, up, grad, gate_grad, up_grad, swiglu_gradients);
}

void geglu_tanh_forward(int64_t n, const float* gate, const float* up, float* y) {
#pragma omp parallel if (n > SMALL)
    join(share(n), gate, up, y, geglu);
}

void geglu_tanh_backward(int64_t n, const float* gate, const float* up, const float* grad, float* gate_grad, float* up_grad) {
#pragma omp parallel if (n > SMALL)
    differentiate(share(n), gate, up, grad, gate_grad, up_grad, geglu_gradients);
}

void clamped_swiglu_forward(int64_t n, const float* gate, const float* up, float* y) {
#pragma omp parallel if (n > SMALL)
    join(share(n), gate, up, y, clamped);
}

void clamped_swiglu_backward(int64_t n, const float* gate, const float* up, const float* grad, float* gate_grad, float* up_grad) {
#pragma omp parallel if (n > SMALL)
    differentiate(share(n), gate, up, grad, gate_grad, up_grad, clamped_gradients);
}
