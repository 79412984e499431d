// Between tokens and rows, where every token has `each` rows of its own: its routes to experts.
// row_of: [tokens, each], int64, all different and below tokens * each; weights: [tokens, each], NULL where all are 1.
#include "simd.h"

// rows[row_of[t, k]] = weights[t, k] x[t]
void spread_rows(int64_t tokens, int64_t each, int64_t size, const int64_t* row_of, const float* weights,
                 const float* x, float* rows) {
#pragma omp parallel for schedule(static)
    for (int64_t route = 0; route < tokens * each; route++) {
        const float* in = x + route / each * size;
        float* out = rows + row_of[route] * size;
        float weight = weights ? weights[route] : 1.0f;
        int64_t i = 0;
        for (; i + VL <= size; i += VL) store(out + i, load(in + i) * splat(weight));
        for (; i < size; i++) out[i] = in[i] * weight;
    }
}

// y[t] = sum over k of weights[t, k] rows[row_of[t, k]], in the order of k
void sum_rows(int64_t tokens, int64_t each, int64_t size, const int64_t* row_of, const float* weights,
              const float* rows, float* y) {
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        float* out = y + token * size;
        for (int64_t k = 0; k < each; k++) {
            const float* in = rows + row_of[token * each + k] * size;
            float weight = weights ? weights[token * each + k] : 1.0f;
            int64_t i = 0;
            for (; i + VL <= size; i += VL)
                store(out + i, load(in + i) * splat(weight) + (k ? load(out + i) : splat(0.0f)));
            for (; i < size; i++) out[i] = in[i] * weight + (k ? out[i] : 0.0f);
        }
    }
}

// products[t, k] = the dot product of x[t] and rows[row_of[t, k]]
void row_products(int64_t tokens, int64_t each, int64_t size, const int64_t* row_of, const float* x, const float* rows,
                  float* products) {
#pragma omp parallel for schedule(static)
    for (int64_t route = 0; route < tokens * each; route++)
        products[route] = dot(size, x + route / each * size, rows + row_of[route] * size);
}
