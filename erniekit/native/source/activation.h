// What joins gate and up in a gated feed-forward network (Shazeer, 2020, arXiv:2002.05202).
#pragma once
#include "simd.h"

// silu(gate) up
INLINE vf swiglu(vf gate, vf up) { return gate * sigmoid(gate) * up; }

// gelu(gate) up with the tanh approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415):
// gate (1 + tanh z) / 2 = gate sigmoid(2 z), z = sqrt(2 / pi) (gate + 0.044715 gate^3)
#define TWICE_ROOT 1.5957691216f
#define CUBIC 0.044715f
INLINE vf tanh_gate(vf gate) { return sigmoid(splat(TWICE_ROOT) * gate * (splat(1.0f) + splat(CUBIC) * gate * gate)); }
INLINE vf geglu(vf gate, vf up) { return gate * tanh_gate(gate) * up; }
