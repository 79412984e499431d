// Rotary position embeddings (Su et al., 2021, arXiv:2104.09864) in both published pairings of channels.
#include <stdint.h>

// Turn every pair (a, b) of a head: a' = a cos - b sin, b' = b cos + a sin. The gradient is the turn back, by `turn` -1.
// x, y: [tokens, heads, size]; cos, sin: [tokens, size], both channels of a pair alike.
void rotary(int64_t tokens, int64_t heads, int64_t size, int32_t interleaved, float turn, const float* restrict x,
            const float* restrict cos, const float* restrict sin, float* restrict y) {
    int64_t half = size / 2;
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = cos + token * size, *s = sin + token * size;
        for (int64_t head = 0; head < heads; head++) {
            const float* in = x + (token * heads + head) * size;
            float* out = y + (token * heads + head) * size;
            if (interleaved)
                for (int64_t i = 0; i < size; i += 2) {
                    out[i] = in[i] * c[i] - in[i + 1] * (turn * s[i]);
                    out[i + 1] = in[i + 1] * c[i] + in[i] * (turn * s[i]);
                }
            else
                for (int64_t i = 0; i < half; i++) {
                    out[i] = in[i] * c[i] - in[i + half] * (turn * s[i]);
                    out[i + half] = in[i + half] * c[i] + in[i] * (turn * s[i]);
                }
        }
    }
}
