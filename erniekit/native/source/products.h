// Products with a weight [out, in] as files have it, of outputs_first.c.
#pragma once
#include "decode.h"

// This range of columns of y = x W, without bias and adapters. spare: outputs_first_spare(w, rows) numbers at a multiple of
// 64 bytes, in which pack_inputs has laid x.
void outputs_first(const Linear* w, Range columns, int64_t rows, const float* x, int64_t x_line, float* y, int64_t line,
                   float* spare);
void pack_inputs(const Linear* w, int64_t rows, const float* x, int64_t x_line, float* spare);
int64_t outputs_first_spare(const Linear* w, int64_t rows);

// float32 weights [count, in] of outputs from o on of a narrower form; those of bytes in units of the scale.
void dense_weights(const Linear* w, int64_t o, int64_t count, float* dense);
