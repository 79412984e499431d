// Normal draws, the same as those of NumPy's Generator(PCG64).standard_normal in float32: the ziggurat of Marsaglia and
// Tsang (2000, https://doi.org/10.18637/jss.v005.i08) over the generator of O'Neill (PCG XSL RR 128/64, 2014).
#include "simd.h"

typedef unsigned __int128 uint128;
enum { WORDS = 256, LAYERS = 256 };

struct generator {
    uint64_t state[2], increment[2];  // each low, high
    int64_t left;                     // of the halves below, from the end
    uint64_t words[WORDS];            // each its lower half first
};

struct ziggurat {
    int32_t limits[LAYERS];  // magnitudes below lie inside of their layer
    float widths[LAYERS], heights[LAYERS], edge, inverse_edge;
};

static void refill(struct generator* g) {
    const uint128 multiplier = (uint128)0x2360ed051fc65da4 << 64 | 0x4385df649fccf645;
    uint128 state = (uint128)g->state[1] << 64 | g->state[0], increment = (uint128)g->increment[1] << 64 | g->increment[0];
    for (int i = 0; i < WORDS; i++) {
        state = state * multiplier + increment;
        uint64_t high = state >> 64, mixed = high ^ (uint64_t)state;
        int turn = high >> 58;
        g->words[i] = mixed >> turn | mixed << (-turn & 63);
    }
    g->state[0] = (uint64_t)state, g->state[1] = state >> 64, g->left = 2 * WORDS;
}

INLINE const char* halves(const struct generator* g) { return (const char*)(g->words + WORDS) - 4 * g->left; }

static uint32_t next_half(struct generator* g) {
    if (!g->left) refill(g);
    uint32_t half;
    memcpy(&half, halves(g), sizeof half);
    g->left--;
    return half;
}

static float next_uniform(struct generator* g) { return (next_half(g) >> 8) * 0x1p-24f; }

INLINE float with_sign(float x, uint32_t half) {  // without a jump, which would be foretold wrongly every other time
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits ^= (half & 256) << 23;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Beyond the edge. Each product is rounded for itself: volatile keeps it out of a fused multiply-add.
static float draw_tail(struct generator* g, const struct ziggurat* z) {
    for (;;) {
        volatile float x = -z->inverse_edge * log1pf(-next_uniform(g)), square = x * x;
        float y = -log1pf(-next_uniform(g));
        if (y + y > square) return z->edge + x;
    }
}

static float draw(struct generator* g, const struct ziggurat* z) {
    for (;;) {
        uint32_t bits = next_half(g);
        int32_t layer = bits & 255, magnitude = bits >> 9;
        float x = with_sign(magnitude * z->widths[layer], bits);
        if (magnitude < z->limits[layer]) return x;
        if (layer == 0) {
            float tail = draw_tail(g, z);
            return magnitude & 256 ? -tail : tail;
        }
        volatile float above = (z->heights[layer - 1] - z->heights[layer]) * next_uniform(g);
        if (above + z->heights[layer] < exp(-0.5 * x * x)) return x;
    }
}

// Draws from the halves at hand, up to the first that does not lie inside of its layer; returns how many.
static int64_t draw_inside(struct generator* g, const struct ziggurat* z, int64_t count, float scale, float* out) {
    const char* at = halves(g);
    int64_t drawn = 0, most = count < g->left ? count : g->left;
    for (; drawn < most; drawn++) {
        uint32_t half;
        memcpy(&half, at + 4 * drawn, sizeof half);
        int32_t layer = half & 255, magnitude = half >> 9;
        if (magnitude >= z->limits[layer]) break;
        out[drawn] = with_sign(magnitude * z->widths[layer] * scale, half);
    }
    g->left -= drawn;
    return drawn;
}

// `count` draws times `scale`
void draw_normal(int64_t count, struct generator* g, const struct ziggurat* z, float scale, float* out) {
    for (int64_t i = 0; i < count;) {
        i += draw_inside(g, z, count - i, scale, out + i);
        if (i < count) out[i++] = draw(g, z) * scale;
    }
}
