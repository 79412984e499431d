// RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467), rows of `size` channels, and its gradient.
#include "norm.h"

// inverse_rms: [rows], r of every row, which the gradient needs
void rms_norm(int64_t rows, int64_t size, const float* x, const float* weight, float epsilon, float* y,
              float* inverse_rms) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        inverse_rms[row] = norm_row(size, x + row * size, weight, epsilon, y + row * size);
}

// partial: [blocks, size], zeros, of which the first row becomes the weight's gradient; NULL where it is frozen.
void rms_norm_backward(int64_t rows, int64_t size, int64_t blocks, const float* x, const float* weight,
                       const float* inverse_rms, const float* grad, float* grad_x, float* partial) {
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t row = rows * block / blocks; row < rows * (block + 1) / blocks; row++)
            norm_row_backward(size, x + row * size, weight, inverse_rms[row], grad + row * size, grad_x + row * size,
                              partial ? partial + block * size : 0);
    if (partial) sum_parts(blocks, size, partial);
}
