// What joins gate and up in a gated feed-forward network.
#pragma once
#include "threads.h"

enum Activation { SWIGLU, GEGLU_TANH, CLAMPED_SWIGLU };  // model/mlp.py has the same numbers

// The values of y in a range, which may lie where the gates do. kind: an `Activation`
void activate(int64_t kind, Range range, const float* gate, const float* up, float* y);
