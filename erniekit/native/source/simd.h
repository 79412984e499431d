// Vectors of float32 as wide as the processor's registers: 16 values with AVX-512, 8 with AVX2.
// GCC's and Clang's vector extensions: one source, compiled once for each path (native/compiler.py).
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VL 16
#else
#define VL 8
#endif

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));

#define SMALL 16384  // values below which waking other threads takes longer than the work

#define INLINE static inline __attribute__((always_inline, unused))

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_int(int32_t x) { return x - (vi){0}; }
INLINE vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf load_part(const float* p, int count, float other) {  // the first `count` values of p, then `other`
    vf v = splat(other);
    for (int i = 0; i < count; i++) v[i] = p[i];
    return v;
}
INLINE void store_part(float* p, vf v, int count) { for (int i = 0; i < count; i++) p[i] = v[i]; }

INLINE vf as_float(vi bits) { vf v; memcpy(&v, &bits, sizeof v); return v; }
INLINE vi as_int(vf v) { vi bits; memcpy(&bits, &v, sizeof v); return bits; }
INLINE float widened(uint16_t upper) {  // of bfloat16
    uint32_t bits = (uint32_t)upper << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE vf choose(vi mask, vf yes, vf no) { return as_float((mask & as_int(yes)) | (~mask & as_int(no))); }  // mask: 0 or -1
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }

INLINE float sum_of(vf v) {  // in one order on every path of the same width
    float s[VL];
    memcpy(s, &v, sizeof s);
    for (int width = VL / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}
INLINE float largest_of(vf v) {
    float s[VL];
    memcpy(s, &v, sizeof s);
    for (int width = VL / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) s[i] = s[i] > s[i + width] ? s[i] : s[i + width];
    return s[0];
}

// e^x by x = n ln 2 + r and a polynomial of r (Cephes' coefficients); relative error below 2e-7. Below -87.3: 0.
// NaN stays NaN, so that a broken number is seen in the loss.
INLINE vf exponential(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vi tiny = x < splat(-87.33654f);
    x = smaller(splat(88.37626f), x);  // in this order NaN passes
    vf shifted = x * splat(1.44269504f) + magic;
    vf n = shifted - magic;
    vf r = x - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    vi power = (as_int(shifted) - as_int(magic)) << 23;
    vf y = choose(tiny, splat(0.0f), as_float(as_int(p) + power));
    return choose(x == x, y, x);
}

INLINE vf shuffle(vf a, vf b, vi which) {  // value k is value which[k] of a followed by b
#ifdef __clang__
    vf mixed;
    for (int k = 0; k < VL; k++) mixed[k] = which[k] < VL ? a[which[k]] : b[which[k] - VL];
    return mixed;
#else
    return __builtin_shuffle(a, b, which);
#endif
}

// One of log2(VL) steps that together transpose VL vectors: a perfect shuffle of all their values.
INLINE void shuffle_rows(const vf in[VL], vf out[VL]) {
    vi low, high;
    for (int k = 0; k < VL; k++) low[k] = k / 2 + k % 2 * VL, high[k] = low[k] + VL / 2;
    for (int r = 0; r < VL / 2; r++) {
        out[2 * r] = shuffle(in[r], in[r + VL / 2], low);
        out[2 * r + 1] = shuffle(in[r], in[r + VL / 2], high);
    }
}

INLINE void transpose(vf rows[VL]) {  // VL x VL values
    vf other[VL];
    for (int width = 1; width < VL; width *= 4) {
        shuffle_rows(rows, other);
        if (2 * width < VL) shuffle_rows(other, rows);
        else memcpy(rows, other, sizeof other);
    }
}

INLINE float dot(int64_t size, const float* a, const float* b) {
    vf sums[4] = {{0}};
    float tail = 0.0f;
    int64_t i = 0;
    for (; i + 4 * VL <= size; i += 4 * VL)
        for (int j = 0; j < 4; j++) sums[j] += load(a + i + j * VL) * load(b + i + j * VL);
    for (; i + VL <= size; i += VL) sums[0] += load(a + i) * load(b + i);
    for (; i < size; i++) tail += a[i] * b[i];
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail;
}

INLINE void multiply_by(int64_t size, float factor, float* x) {
    int64_t i = 0;
    for (; i + VL <= size; i += VL) store(x + i, load(x + i) * splat(factor));
    for (; i < size; i++) x[i] *= factor;
}

INLINE vf sigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); }
