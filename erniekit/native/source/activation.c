// What joins gate and up in a gated feed-forward network (Shazeer, 2020, arXiv:2002.05202), and its gradients:
// elementwise functions of gate, up and the gradient of their joint output, all of n values.
#include "activation.h"
#include "simd.h"

typedef struct {
    const float *gate, *up, *grad;  // grad: of y
    float *y, *gate_grad, *up_grad;
} Arrays;
typedef struct { vf gate, up; } Gradients;

typedef vf (*Forward)(vf gate, vf up);
typedef Gradients (*Backward)(vf gate, vf up, vf grad);

INLINE void join(Range r, Arrays a, Forward function) {
    int64_t i = r.begin;
    for (; i + VL <= r.end; i += VL) store(a.y + i, function(load(a.gate + i), load(a.up + i)));
    int rest = (int)(r.end - i);
    if (rest) store_part(a.y + i, function(load_part(a.gate + i, rest, 0.0f), load_part(a.up + i, rest, 0.0f)), rest);
}

INLINE void differentiate(Range r, Arrays a, Backward function) {
    int64_t i = r.begin;
    for (; i + VL <= r.end; i += VL) {
        Gradients d = function(load(a.gate + i), load(a.up + i), load(a.grad + i));
        store(a.gate_grad + i, d.gate);
        store(a.up_grad + i, d.up);
    }
    int rest = (int)(r.end - i);
    if (!rest) return;
    vf gate = load_part(a.gate + i, rest, 0.0f), up = load_part(a.up + i, rest, 0.0f);
    Gradients d = function(gate, up, load_part(a.grad + i, rest, 0.0f));
    store_part(a.gate_grad + i, d.gate, rest);
    store_part(a.up_grad + i, d.up, rest);
}

// silu(gate) up. With s = sigmoid(gate) and silu(gate) = gate s: d silu = s + silu (1 - s)
INLINE vf swiglu(vf gate, vf up) { return gate * sigmoid(gate) * up; }
INLINE Gradients swiglu_gradients(vf gate, vf up, vf grad) {
    vf s = sigmoid(gate), silu = gate * s;
    return (Gradients){(s + silu * (splat(1.0f) - s)) * up * grad, grad * silu};
}

// gelu(gate) up with the tanh approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415):
// gate (1 + tanh z) / 2 = gate sigmoid(2 z), z = sqrt(2 / pi) (gate + 0.044715 gate^3)
#define TWICE_ROOT 1.5957691216f
#define CUBIC 0.044715f
INLINE vf tanh_gate(vf gate) { return sigmoid(splat(TWICE_ROOT) * gate * (splat(1.0f) + splat(CUBIC) * gate * gate)); }
INLINE vf geglu_tanh(vf gate, vf up) { return gate * tanh_gate(gate) * up; }
INLINE Gradients geglu_tanh_gradients(vf gate, vf up, vf grad) {
    vf s = tanh_gate(gate), gelu = gate * s;
    vf slope = splat(TWICE_ROOT) * (splat(1.0f) + splat(3.0f * CUBIC) * gate * gate);
    return (Gradients){(s + gelu * (splat(1.0f) - s) * slope) * up * grad, grad * gelu};
}

// gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up in [-7, 7], as in GPT-OSS; no gradient beyond
#define LIMIT 7.0f
#define SHARPNESS 1.702f
INLINE vf clamped_swiglu(vf gate, vf up) {
    gate = smaller(splat(LIMIT), gate);  // in this order NaN passes
    up = larger(splat(-LIMIT), smaller(splat(LIMIT), up));
    return gate * sigmoid(splat(SHARPNESS) * gate) * (up + splat(1.0f));
}
INLINE Gradients clamped_swiglu_gradients(vf gate, vf up, vf grad) {
    vi gate_passes = gate <= splat(LIMIT), up_passes = (up <= splat(LIMIT)) & (up >= splat(-LIMIT));
    gate = smaller(splat(LIMIT), gate);
    up = larger(splat(-LIMIT), smaller(splat(LIMIT), up));
    vf s = sigmoid(splat(SHARPNESS) * gate), swish = gate * s, zero = splat(0.0f);
    vf slope = s + splat(SHARPNESS) * swish * (splat(1.0f) - s);
    return (Gradients){choose(gate_passes, slope * (up + splat(1.0f)) * grad, zero), choose(up_passes, grad * swish, zero)};
}

// A function for each loop: the constants of all kinds together do not fit into the registers.
static void join_swiglu(Range r, Arrays a) { join(r, a, swiglu); }
static void join_geglu_tanh(Range r, Arrays a) { join(r, a, geglu_tanh); }
static void join_clamped_swiglu(Range r, Arrays a) { join(r, a, clamped_swiglu); }
static void differentiate_swiglu(Range r, Arrays a) { differentiate(r, a, swiglu_gradients); }
static void differentiate_geglu_tanh(Range r, Arrays a) { differentiate(r, a, geglu_tanh_gradients); }
static void differentiate_clamped_swiglu(Range r, Arrays a) { differentiate(r, a, clamped_swiglu_gradients); }

static const struct { void (*forward)(Range, Arrays), (*backward)(Range, Arrays); } KINDS[] = {
    [SWIGLU] = {join_swiglu, differentiate_swiglu},
    [GEGLU_TANH] = {join_geglu_tanh, differentiate_geglu_tanh},
    [CLAMPED_SWIGLU] = {join_clamped_swiglu, differentiate_clamped_swiglu},
};

static Range share(int64_t n) { return share_of(omp_get_thread_num(), omp_get_num_threads(), n, VL); }

void activate(int64_t kind, Range range, const float* gate, const float* up, float* y) {
    KINDS[kind].forward(range, (Arrays){.gate = gate, .up = up, .y = y});
}

void activation_forward(int64_t kind, int64_t n, const float* gate, const float* up, float* y) {
#pragma omp parallel if (n > SMALL)
    activate(kind, share(n), gate, up, y);
}

void activation_backward(int64_t kind, int64_t n, const float* gate, const float* up, const float* grad, float* gate_grad,
                         float* up_grad) {
    Arrays arrays = {.gate = gate, .up = up, .grad = grad, .gate_grad = gate_grad, .up_grad = up_grad};
#pragma omp parallel if (n > SMALL)
    KINDS[kind].backward(share(n), arrays);
}
