// Rotary position embeddings (Su et al., 2021, arXiv:2104.09864) in both published pairings of channels, alone and after
// the RMSNorm of heads (Dehghani et al., 2023, arXiv:2302.05442).
// x, y: [tokens, heads, size]; cos, sin: [tokens, size], both channels of a pair alike.
#include "norm.h"

// Turn every pair (a, b) of a head: a' = a cos - b sin, b' = b cos + a sin. The gradient is the turn back, by `turn` -1.
// out may be in: a step of the loops reads and writes one pair.
INLINE void turn_row(int64_t size, int32_t interleaved, float turn, const float* cos, const float* sin, const float* in,
                     float* out) {
    int64_t half = size / 2;
    if (interleaved) {
#pragma GCC ivdep
        for (int64_t i = 0; i < half; i++) {
            float a = in[2 * i], b = in[2 * i + 1], c = cos[2 * i], s = turn * sin[2 * i];
            out[2 * i] = a * c - b * s;
            out[2 * i + 1] = b * c + a * s;
        }
    } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < half; i++) {
            float a = in[i], b = in[i + half], c = cos[i], s = turn * sin[i];
            out[i] = a * c - b * s;
            out[i + half] = b * c + a * s;
        }
    }
}

void rotary(int64_t tokens, int64_t heads, int64_t size, int32_t interleaved, float turn, const float* x,
            const float* cos, const float* sin, float* y) {
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t row = token * heads; row < (token + 1) * heads; row++)
            turn_row(size, interleaved, turn, cos + token * size, sin + token * size, x + row * size, y + row * size);
}

// weight: [size]; inverse_rms: [tokens, heads], as in norm.c
void norm_rotary(int64_t tokens, int64_t heads, int64_t size, int32_t interleaved, const float* x, const float* weight,
                 float epsilon, const float* cos, const float* sin, float* y, float* inverse_rms) {
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t row = token * heads; row < (token + 1) * heads; row++) {
            float* out = y + row * size;
            inverse_rms[row] = norm_row(size, x + row * size, weight, epsilon, out);
            turn_row(size, interleaved, 1.0f, cos + token * size, sin + token * size, out, out);
        }
}

// partial: [blocks, size], as in norm.c
void norm_rotary_backward(int64_t tokens, int64_t heads, int64_t size, int64_t blocks, int32_t interleaved,
                          const float* x, const float* weight, const float* inverse_rms, const float* cos,
                          const float* sin, const float* grad, float* grad_x, float* partial) {
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t token = tokens * block / blocks; token < tokens * (block + 1) / blocks; token++)
            for (int64_t row = token * heads; row < (token + 1) * heads; row++) {
                float* out = grad_x + row * size;
                turn_row(size, interleaved, -1.0f, cos + token * size, sin + token * size, grad + row * size, out);
                norm_row_backward(size, x + row * size, weight, inverse_rms[row], out, out,
                                  partial ? partial + block * size : 0);
            }
    if (partial) sum_parts(blocks, size, partial);
}
