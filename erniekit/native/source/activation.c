// What joins gate and up in a gated feed-forward network (Shazeer, 2020, arXiv:2002.05202), and its gradients:
// elementwise functions of gate, up and the gradient of their joint output, all of n values.
#include "activation.h"
#include "threads.h"

typedef struct { vf gate, up; } Gradients;

typedef vf (*Forward)(vf gate, vf up);
typedef Gradients (*Backward)(vf gate, vf up, vf grad);

static Range share(int64_t n) { return share_of(omp_get_thread_num(), omp_get_num_threads(), n, VL); }

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

// With s = sigmoid(gate) and silu(gate) = gate s: d silu = s + silu (1 - s)
INLINE Gradients swiglu_gradients(vf gate, vf up, vf grad) {
    vf s = sigmoid(gate), silu = gate * s;
    return (Gradients){(s + silu * (splat(1.0f) - s)) * up * grad, grad * silu};
}

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
