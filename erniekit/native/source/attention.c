// Attention over FlashMask's columns, forward and backward, by tiles with an online softmax: FlashAttention (Dao et al.,
// 2022, arXiv:2205.14135; Dao, 2023, arXiv:2307.08691) with the column bounds of FlashMask (Wang et al., 2024,
// arXiv:2410.01359).
//
// Tokens of all batch rows are numbered in one sequence and cut into tiles, none of which crosses the border of a
// segment; queries see keys of their own segment only (model/column_plan.py). A tile holds at most
// TILE tokens and is padded to TILE with masked keys, so that no loop over keys has a tail. Heads are padded to whole
// vectors (`width`) in buffers of our own.
//
// Scores are in powers of two: queries carry scale * log2(e), and e^x is computed as 2^x.
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "simd.h"
#include "threads.h"

#define TILE 48             // tokens of a tile; column_plan.COLUMN_TILE is the same number
#define ROWS (VL / 2)       // a register tile of a product: ROWS x at most 3 vectors
#define STRIPS (TILE / ROWS) // of the queries of a tile
#define LANES (TILE / VL)   // vectors of the keys of a tile
#define CHUNK 4             // tiles of queries of backward that share a tile of keys in the cache
#define MAX_WIDTH 256       // native_attention.LARGEST_HEAD
#define HIDDEN -1e30f       // the score of a masked key, and
#define LOWEST -1e29f       // the least peak of a query: finite, so that no difference is NaN, and 2^(HIDDEN - LOWEST) is 0
#define SLACK 8.0f          // how far scores may exceed the peak that probabilities are relative to
#define ALIGNED __attribute__((aligned(64)))

typedef uint32_t vu __attribute__((vector_size(4 * VL)));

typedef struct {
    int64_t heads, key_heads, mask_heads, size, width, tile_count;
    const int32_t* tiles;    // [tile_count, 4]: first token, tokens, first and end tile of the segment
    const int32_t* bounds;   // [mask_heads, tile_count, 4, TILE]: two half-open ranges of queries that may not see a key
    const int32_t* extremes; // [mask_heads, tile_count, 2, 4]: lowest and highest bounds of a tile
    uint64_t seed;           // of dropout
    uint32_t dropped;        // of 65,536 probabilities
} Attention;

typedef struct { int first, tokens, segment_first, segment_end; } Tile;
typedef struct { int begin, end, masked; } Seen;  // vectors of keys that some query sees; whether some pair is masked

INLINE Tile tile_at(const Attention* a, int64_t tile) {
    const int32_t* t = a->tiles + 4 * tile;
    return (Tile){t[0], t[1], t[2], t[3]};
}
INLINE int64_t mask_head(const Attention* a, int64_t head) { return head * a->mask_heads / a->heads; }
INLINE const int32_t* bounds_of(const Attention* a, int64_t head, int64_t tile) {
    return a->bounds + (mask_head(a, head) * a->tile_count + tile) * 4 * TILE;
}
INLINE vi load_int(const int32_t* p) { vi v; memcpy(&v, p, sizeof v); return v; }

// ---- what is masked ----

// Some query of [first, end) may see some key of the tile; false only if one range hides each key from all of them.
static int tile_is_seen(const Attention* a, int64_t head, int64_t tile, int first, int end) {
    const int32_t* low = a->extremes + (mask_head(a, head) * a->tile_count + tile) * 8;
    const int32_t* high = low + 4;
    return !((high[0] <= first && low[1] >= end) || (high[2] <= first && low[3] >= end));
}

static int tile_is_unmasked(const Attention* a, int64_t head, int64_t tile, int first, int end) {
    const int32_t* low = a->extremes + (mask_head(a, head) * a->tile_count + tile) * 8;
    const int32_t* high = low + 4;
    return (low[0] >= end || high[1] <= first) && (low[2] >= end || high[3] <= first);
}

INLINE int any(vi mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#endif
    int32_t m[VL], all = 0;
    memcpy(m, &mask, sizeof m);
    for (int i = 0; i < VL; i++) all |= m[i];
    return all != 0;
}

// What ROWS queries from `first` on see of a tile of keys with these bounds.
static Seen seen_range(const int32_t* bounds, int first) {
    Seen range = {LANES, 0, 0};
    vi start = splat_int(first), end = splat_int(first + ROWS);
    for (int j = 0; j < LANES; j++) {
        const int32_t* b = bounds + j * VL;
        vi b0 = load_int(b), b1 = load_int(b + TILE), b2 = load_int(b + 2 * TILE), b3 = load_int(b + 3 * TILE);
        vi hidden = ((b0 <= start) & (b1 >= end)) | ((b2 <= start) & (b3 >= end));
        vi touched = ((b0 < end) & (b1 > start)) | ((b2 < end) & (b3 > start));
        if (any(~hidden)) {
            if (range.begin > j) range.begin = j;
            range.end = j + 1;
        }
        range.masked |= any(touched);
    }
    return range.begin < range.end ? range : (Seen){0, 0, 0};
}

// The same for each strip of the queries of a tile.
static void seen_ranges(const Attention* a, int64_t head, int64_t tile, Tile queries, Seen* ranges) {
    int unmasked = tile_is_unmasked(a, head, tile, queries.first, queries.first + TILE);
    const int32_t* bounds = bounds_of(a, head, tile);
    for (int i = 0; i < queries.tokens; i += ROWS)
        *ranges++ = unmasked ? (Seen){0, LANES, 0} : seen_range(bounds, queries.first + i);
}

INLINE vi hidden_from(const int32_t* bounds, int query) {  // of one vector of keys
    vi row = splat_int(query);
    vi lower = (row >= load_int(bounds)) & (row < load_int(bounds + TILE));
    return lower | ((row >= load_int(bounds + 2 * TILE)) & (row < load_int(bounds + 3 * TILE)));
}

// ---- dropout: every decision is a function of the seed, the head, the query and the key ----

INLINE uint64_t mix(uint64_t x) {  // SplitMix64 (Steele et al., 2014)
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

typedef struct { uint32_t low, high; } RowKey;

INLINE RowKey row_key(const Attention* a, int64_t head, int query) {
    uint64_t key = mix(a->seed ^ mix(((uint64_t)head << 32 | (uint32_t)query) + 0x9e3779b97f4a7c15u));
    return (RowKey){(uint32_t)key, (uint32_t)(key >> 32)};
}

// Return 0 for dropped and `kept` for other keys, from `first` on; a 32-bit finaliser (MurmurHash3's) mixes twice.
INLINE vf dropout_mask(const Attention* a, RowKey key, int first, float kept) {
    vu x;
    for (int i = 0; i < VL; i++) x[i] = (uint32_t)(first + i);
    x = x * 0x9e3779b9u + key.low;
    for (int round = 0; round < 2; round++) {
        x ^= x >> 16; x *= 0x85ebca6bu;
        x ^= x >> 13; x *= 0xc2b2ae35u;
        x ^= x >> 16; x ^= round ? 0 : key.high;
    }
    return choose((vi)(x >> 16) >= splat_int((int32_t)a->dropped), splat(kept), splat(0.0f));
}

INLINE float kept_scale(const Attention* a) { return 65536.0f / (float)(65536 - a->dropped); }

// ---- arithmetic ----

// 2^x for x <= 128 with a relative error of 2e-7; 0 for x < -126, or below the smallest number. NaN stays NaN.
INLINE vf power_of_two(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf shifted = x + magic, n = shifted - magic, r = x - n;
    vf p = splat(1.3264760e-3f);
    p = p * r + splat(9.6715132e-3f);
    p = p * r + splat(5.5507337e-2f);
    p = p * r + splat(2.4022242e-1f);
    p = p * r + splat(6.9314698e-1f);
    p = p * r + splat(1.0f);
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    p *= as_float((as_int(shifted) << 23) + splat_int(127 << 23));
    return choose(x < splat(-126.0f), splat(0.0f), p);
#endif
}

// c [ROWS, columns vectors] = or += a b; element (row, step) of a is a[row * a_row + step * a_step].
INLINE void register_tile(const int columns, int depth, const float* a, int64_t a_row, int64_t a_step, const float* b,
                          int64_t b_row, float* c, int64_t c_row, int add) {
    vf sum[ROWS][3];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int j = 0; j < columns; j++) sum[r][j] = add ? load(c + r * c_row + j * VL) : splat(0.0f);
    for (int step = 0; step < depth; step++, a += a_step, b += b_row) {
        vf row_of_b[3];
#pragma GCC unroll 3
        for (int j = 0; j < columns; j++) row_of_b[j] = load(b + j * VL);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            vf x = splat(a[r * a_row]);
#pragma GCC unroll 3
            for (int j = 0; j < columns; j++) sum[r][j] += x * row_of_b[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int j = 0; j < columns; j++) store(c + r * c_row + j * VL, sum[r][j]);
}

// The same for any number of vectors.
static void multiply(int vectors, int depth, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row,
                     float* c, int64_t c_row, int add) {
    for (int at = 0; at < vectors;) {
        int left = vectors - at, columns = left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
        const float* b_at = b + at * VL;
        float* c_at = c + at * VL;
        if (columns == 3) register_tile(3, depth, a, a_row, a_step, b_at, b_row, c_at, c_row, add);
        else if (columns == 2) register_tile(2, depth, a, a_row, a_step, b_at, b_row, c_at, c_row, add);
        else register_tile(1, depth, a, a_row, a_step, b_at, b_row, c_at, c_row, add);
        at += columns;
    }
}

// Products of a strip of queries and the keys of a tile that it sees: scores = q k^T, and out += scores v.
static void multiply_keys(const Attention* a, Seen range, const float* q, const float* k_columns, float* scores) {
    int key = range.begin * VL;
    multiply(range.end - range.begin, a->size, q, a->width, 1, k_columns + key, TILE, scores + key, TILE, 0);
}
static void add_from_keys(const Attention* a, Seen range, const float* scores, const float* v_rows, float* out) {
    int key = range.begin * VL, count = (range.end - range.begin) * VL;
    if (count) multiply(a->width / VL, count, scores + key, TILE, 1, v_rows + key * a->width, a->width, out, a->width, 1);
}

// ---- copies between the caller's layout [tokens, heads, size] and tiles ----

// Rows [TILE, width] of one head, times `scale`, with zeros where the tile has no token or the head no channel.
static void copy_rows(const Attention* a, Tile t, const float* x, int64_t heads, int64_t head, float scale, float* rows) {
    for (int i = 0; i < TILE; i++, rows += a->width) {
        if (i >= t.tokens) {
            memset(rows, 0, sizeof(float) * a->width);
            continue;
        }
        const float* from = x + ((t.first + i) * heads + head) * a->size;
        for (int64_t d = 0; d < a->size; d++) rows[d] = from[d] * scale;
        for (int64_t d = a->size; d < a->width; d++) rows[d] = 0.0f;
    }
}

// The same, transposed: [size, TILE].
static void copy_columns(const Attention* a, Tile t, const float* x, int64_t heads, int64_t head, float* columns) {
    const float* from = x + (t.first * heads + head) * a->size;
    for (int i = 0; i < TILE; i += VL)
        for (int64_t d = 0; d < a->size; d += VL) {
            vf block[VL];
            const int64_t left = a->size - d;
            for (int r = 0; r < VL; r++) {
                const float* row = from + (i + r) * heads * a->size + d;
                block[r] = i + r >= t.tokens ? splat(0.0f) : left >= VL ? load(row) : load_part(row, left, 0.0f);
            }
            transpose(block);
            for (int c = 0; c < VL && c < left; c++) store(columns + (d + c) * TILE + i, block[c]);
        }
}

// ---- forward ----

// Turn the total and the output of a query to another peak.
static void turn_row(int64_t width, float now, float* peak, vf* total, float* out) {
    vf turn = power_of_two(splat(*peak - now));
    *total *= turn;
    for (int64_t d = 0; d < width; d += VL) store(out + d, load(out + d) * turn);
    *peak = now;
}

// Scores -> probabilities, relative to a peak of each query that no score so far exceeds by more than SLACK.
INLINE void softmax_lanes(const int begin, const int end, const int masked, int64_t width, const int32_t* bounds, int first,
                          float* scores, float* peak, vf* total, float* out) {
    for (int r = 0; r < ROWS; r++, scores += TILE, out += width) {
        vf x[LANES], top = splat(LOWEST);
#pragma GCC unroll 8
        for (int j = begin; j < end; j++) {
            x[j] = load(scores + j * VL);
            if (masked) x[j] = choose(hidden_from(bounds + j * VL, first + r), splat(HIDDEN), x[j]);
            top = larger(top, x[j]);
        }
        if (any(top > splat(peak[r] + SLACK))) turn_row(width, largest_of(top), peak + r, total + r, out);
        vf now = splat(peak[r]), sum = total[r];
#pragma GCC unroll 8
        for (int j = begin; j < end; j++) {
            x[j] = power_of_two(x[j] - now);
            sum += x[j];
            store(scores + j * VL, x[j]);
        }
        total[r] = sum;
    }
}

static void softmax_strip(const Attention* a, const int32_t* bounds, Seen range, int first, float* scores, float* peak,
                          vf* total, float* out) {
    if (range.masked || range.end - range.begin < LANES)
        softmax_lanes(range.begin, range.end, 1, a->width, bounds, first, scores, peak, total, out);
    else
        softmax_lanes(0, LANES, 0, a->width, bounds, first, scores, peak, total, out);
}

static void drop_strip(const Attention* a, int64_t head, Seen range, int first, int first_key, float* probabilities) {
    for (int r = 0; r < ROWS; r++, probabilities += TILE) {
        RowKey key = row_key(a, head, first + r);
        for (int j = range.begin; j < range.end; j++) {
            vf mask = dropout_mask(a, key, first_key + j * VL, kept_scale(a));
            store(probabilities + j * VL, load(probabilities + j * VL) * mask);
        }
    }
}

static void forward_tile(const Attention* a, int64_t tile, int64_t head, const float* q, const float* keys,
                         const float* values, float* out, float* lse, int64_t tokens) {
    float q_rows[TILE * MAX_WIDTH] ALIGNED, out_rows[TILE * MAX_WIDTH] ALIGNED, scores[TILE * TILE] ALIGNED;
    float peak[TILE];
    vf total[TILE];
    Seen ranges[STRIPS];
    const int64_t width = a->width;
    Tile t = tile_at(a, tile);
    const int strips = (t.tokens + ROWS - 1) / ROWS;
    copy_rows(a, t, q, a->heads, head, 1.44269504f / sqrtf((float)a->size), q_rows);
    memset(out_rows, 0, sizeof(float) * TILE * width);
    for (int i = 0; i < TILE; i++) peak[i] = LOWEST, total[i] = splat(0.0f);
    for (int64_t other = t.segment_first; other < t.segment_end; other++) {
        if (!tile_is_seen(a, head, other, t.first, t.first + t.tokens)) continue;
        const int32_t* bounds = bounds_of(a, head, other);
        const float *k = keys + other * a->size * TILE, *v = values + other * width * TILE;
        seen_ranges(a, head, other, t, ranges);
        for (int s = 0, i = 0; s < strips; s++, i += ROWS)
            multiply_keys(a, ranges[s], q_rows + i * width, k, scores + i * TILE);
        for (int s = 0, i = 0; s < strips; s++, i += ROWS) {
            float* rows = scores + i * TILE;
            softmax_strip(a, bounds, ranges[s], t.first + i, rows, peak + i, total + i, out_rows + i * width);
            if (a->dropped) drop_strip(a, head, ranges[s], t.first + i, a->tiles[4 * other], rows);
        }
        for (int s = 0, i = 0; s < strips; s++, i += ROWS)
            add_from_keys(a, ranges[s], scores + i * TILE, v, out_rows + i * width);
    }
    for (int i = 0; i < t.tokens; i++) {
        float sum = sum_of(total[i]), share = sum == 0.0f ? 0.0f : 1.0f / sum;  // 0: the query sees no key
        float* to = out + ((t.first + i) * a->heads + head) * a->size;
        for (int64_t d = 0; d < a->size; d++) to[d] = out_rows[i * width + d] * share;
        lse[head * tokens + t.first + i] = sum == 0.0f ? 0.0f : peak[i] + log2f(sum);
    }
}

// Attend: out = dropout(softmax(q k^T / sqrt(size) + mask)) v, and the logarithm to base 2 of each softmax's sum.
// q, out [tokens, heads, size]; k, v [tokens, key_heads, size]; lse [heads, tokens];
// workspace: key_heads * tile_count * TILE * (size + width).
void attention_forward(int64_t tokens, int64_t heads, int64_t key_heads, int64_t mask_heads, int64_t size,
                       int64_t tile_count, const int32_t* tiles, const int32_t* bounds, const int32_t* extremes,
                       int64_t seed, int64_t dropped, const float* q, const float* k, const float* v, float* workspace,
                       float* out, float* lse) {
    const Attention a = {heads, key_heads, mask_heads, size, (size + VL - 1) / VL * VL, tile_count,
                         tiles, bounds, extremes, (uint64_t)seed, (uint32_t)dropped};
    const int64_t key_tile = size * TILE, value_tile = a.width * TILE, group = heads / key_heads;
    float *keys = workspace, *values = workspace + key_heads * tile_count * key_tile;
#pragma omp parallel
    {
#pragma omp for schedule(static) collapse(2)
        for (int64_t head = 0; head < key_heads; head++)
            for (int64_t tile = 0; tile < tile_count; tile++) {
                int64_t at = head * tile_count + tile;
                copy_columns(&a, tile_at(&a, tile), k, key_heads, head, keys + at * key_tile);
                copy_rows(&a, tile_at(&a, tile), v, key_heads, head, 1.0f, values + at * value_tile);
            }
#pragma omp for schedule(monotonic : dynamic, 1) collapse(3)
        for (int64_t key_head = 0; key_head < key_heads; key_head++)
            for (int64_t tile = 0; tile < tile_count; tile++)
                for (int64_t member = 0; member < group; member++) {  // neighbours in memory, with the same keys
                    int64_t at = key_head * tile_count;
                    forward_tile(&a, tile, key_head * group + member, q, keys + at * key_tile, values + at * value_tile, out,
                                 lse, tokens);
                }
    }
}

// ---- backward ----
// With P the probabilities, M the dropout mask and O = (P M) V:
//     dV = (P M)^T dO,   dP = M (dO V^T),   dS = P (dP - rowsum(dO O)),   dQ = dS K,   dK = dS^T Q.

typedef struct {  // of one head, rows [TILE, width]
    Tile tile;
    float q[TILE * MAX_WIDTH] ALIGNED, grad_out[TILE * MAX_WIDTH] ALIGNED, dq[TILE * MAX_WIDTH] ALIGNED;
    float lse[TILE], row_sums[TILE];
} Queries;

typedef struct {  // of one tile and head
    const float *k_columns, *v_columns, *k_rows;
    float *dk, *dv;
} Keys;

static void load_queries(const Attention* a, int64_t tile, int64_t head, const float* q, const float* out,
                         const float* grad_out, const float* lse, int64_t tokens, Queries* x) {
    Tile t = x->tile = tile_at(a, tile);
    copy_rows(a, t, q, a->heads, head, 1.44269504f / sqrtf((float)a->size), x->q);
    copy_rows(a, t, grad_out, a->heads, head, 1.0f, x->grad_out);
    memset(x->dq, 0, sizeof(float) * TILE * a->width);
    for (int i = 0; i < TILE; i++) {
        x->lse[i] = i < t.tokens ? lse[head * tokens + t.first + i] : 0.0f;
        const float* o = out + ((t.first + i) * a->heads + head) * a->size;
        x->row_sums[i] = i < t.tokens ? dot(a->size, o, x->grad_out + i * a->width) : 0.0f;
    }
}

// Scores and dP of a strip of queries -> P M and dS.
INLINE void gradient_lanes(const int begin, const int end, const int masked, const int drops, const Attention* a,
                           int64_t head, const int32_t* bounds, const Queries* x, int i, int first_key, float* p, float* ds) {
    for (int r = i; r < i + ROWS; r++, p += TILE, ds += TILE) {
        RowKey key = drops ? row_key(a, head, x->tile.first + r) : (RowKey){0, 0};
        vf lse = splat(x->lse[r]), row_sum = splat(x->row_sums[r]);
#pragma GCC unroll 8
        for (int j = begin; j < end; j++) {
            vf score = load(p + j * VL), d = load(ds + j * VL);
            if (masked) score = choose(hidden_from(bounds + j * VL, x->tile.first + r), splat(HIDDEN), score);
            vf probability = power_of_two(score - lse), kept = probability;
            if (drops) {
                vf mask = dropout_mask(a, key, first_key + j * VL, kept_scale(a));
                kept *= mask;
                d *= mask;
            }
            store(p + j * VL, kept);
            store(ds + j * VL, probability * (d - row_sum));
        }
    }
}

static void gradient_strip(const Attention* a, int64_t head, const int32_t* bounds, Seen range, const Queries* x, int i,
                           int first_key, float* p, float* ds) {
    if (a->dropped)
        gradient_lanes(range.begin, range.end, 1, 1, a, head, bounds, x, i, first_key, p, ds);
    else if (range.masked || range.end - range.begin < LANES)
        gradient_lanes(range.begin, range.end, 1, 0, a, head, bounds, x, i, first_key, p, ds);
    else
        gradient_lanes(0, LANES, 0, 0, a, head, bounds, x, i, first_key, p, ds);
}

INLINE void clear_lanes(float* rows, int begin, int end) {
    for (int r = 0; r < ROWS && begin < end; r++) memset(rows + r * TILE + begin * VL, 0, sizeof(float) * VL * (end - begin));
}

// sums += scores^T rows, for the queries that see each vector of keys.
static void add_to_keys(const Attention* a, const int* first_strip, const int* end_strip, const float* scores,
                        const float* rows, float* sums) {
    for (int key = 0; key < TILE; key += ROWS) {
        int j = key / VL, query = first_strip[j] * ROWS, count = end_strip[j] * ROWS - query;
        if (count > 0)
            multiply(a->width / VL, count, scores + query * TILE + key, 1, TILE, rows + query * a->width, a->width,
                     sums + key * a->width, a->width, 1);
    }
}

static void backward_pair(const Attention* a, int64_t head, int64_t tile, Queries* x, Keys k) {
    float p[TILE * TILE] ALIGNED, ds[TILE * TILE] ALIGNED;
    const int64_t width = a->width;
    const int32_t* bounds = bounds_of(a, head, tile);
    const int strips = (x->tile.tokens + ROWS - 1) / ROWS;
    Seen ranges[STRIPS];
    int first_strip[LANES], end_strip[LANES];  // of the queries that see a vector of keys
    for (int j = 0; j < LANES; j++) first_strip[j] = strips, end_strip[j] = 0;
    seen_ranges(a, head, tile, x->tile, ranges);
    for (int s = 0, i = 0; s < strips; s++, i += ROWS)
        multiply_keys(a, ranges[s], x->q + i * width, k.k_columns, p + i * TILE);
    for (int s = 0, i = 0; s < strips; s++, i += ROWS)
        multiply_keys(a, ranges[s], x->grad_out + i * width, k.v_columns, ds + i * TILE);
    for (int s = 0, i = 0; s < strips; s++, i += ROWS) {
        float *p_rows = p + i * TILE, *ds_rows = ds + i * TILE;
        gradient_strip(a, head, bounds, ranges[s], x, i, a->tiles[4 * tile], p_rows, ds_rows);
        clear_lanes(p_rows, 0, ranges[s].begin), clear_lanes(p_rows, ranges[s].end, LANES);
        clear_lanes(ds_rows, 0, ranges[s].begin), clear_lanes(ds_rows, ranges[s].end, LANES);
        for (int j = ranges[s].begin; j < ranges[s].end; j++) {
            if (first_strip[j] > s) first_strip[j] = s;
            end_strip[j] = s + 1;
        }
    }
    for (int s = 0, i = 0; s < strips; s++, i += ROWS) add_from_keys(a, ranges[s], ds + i * TILE, k.k_rows, x->dq + i * width);
    add_to_keys(a, first_strip, end_strip, p, x->grad_out, k.dv);
    add_to_keys(a, first_strip, end_strip, ds, x->q, k.dk);
}

static void store_dq(const Attention* a, int64_t head, const Queries* x, float* dq) {
    const float scale = 1.0f / sqrtf((float)a->size);
    for (int i = 0; i < x->tile.tokens; i++) {
        float* to = dq + ((x->tile.first + i) * a->heads + head) * a->size;
        for (int64_t d = 0; d < a->size; d++) to[d] = x->dq[i * a->width + d] * scale;
    }
}

// Sum the parts [heads, tile_count, TILE, width] of the query heads that share a key head, always in the same order.
static void sum_parts(const Attention* a, int64_t tile, int64_t key_head, const float* parts, float scale, float* sum) {
    const int64_t group = a->heads / a->key_heads, head_rows = a->tile_count * TILE * a->width;
    Tile t = tile_at(a, tile);
    for (int i = 0; i < t.tokens; i++) {
        const float* from = parts + key_head * group * head_rows + (tile * TILE + i) * a->width;
        float* to = sum + ((t.first + i) * a->key_heads + key_head) * a->size;
        for (int64_t d = 0; d < a->size; d++) to[d] = from[d] * scale;
        for (int64_t g = 1; g < group; g++)
            for (int64_t d = 0; d < a->size; d++) to[d] += from[g * head_rows + d] * scale;
    }
}

// The gradients of q, k and v. `segments` [segment_count, 2]: their first and end tiles, the longest segments first.
// workspace: (2 * key_heads * size + (key_heads + 2 * heads) * width) * tile_count * TILE.
void attention_backward(int64_t tokens, int64_t heads, int64_t key_heads, int64_t mask_heads, int64_t size,
                        int64_t tile_count, const int32_t* tiles, const int32_t* bounds, const int32_t* extremes,
                        int64_t seed, int64_t dropped, const float* q, const float* k, const float* v, float* workspace,
                        const float* out, const float* lse, const float* grad_out, int64_t segment_count,
                        const int32_t* segments, float* dq, float* dk, float* dv) {
    const Attention a = {heads, key_heads, mask_heads, size, (size + VL - 1) / VL * VL, tile_count,
                         tiles, bounds, extremes, (uint64_t)seed, (uint32_t)dropped};
    const int64_t column_tile = size * TILE, row_tile = a.width * TILE, group = heads / key_heads;
    float *k_columns = workspace, *v_columns = k_columns + key_heads * tile_count * column_tile;
    float *k_rows = v_columns + key_heads * tile_count * column_tile;
    float *dk_parts = k_rows + key_heads * tile_count * row_tile, *dv_parts = dk_parts + heads * tile_count * row_tile;
#pragma omp parallel
    {
#pragma omp for schedule(static) collapse(2)
        for (int64_t head = 0; head < key_heads; head++)
            for (int64_t tile = 0; tile < tile_count; tile++) {
                int64_t at = head * tile_count + tile;
                Tile t = tile_at(&a, tile);
                copy_columns(&a, t, k, key_heads, head, k_columns + at * column_tile);
                copy_columns(&a, t, v, key_heads, head, v_columns + at * column_tile);
                copy_rows(&a, t, k, key_heads, head, 1.0f, k_rows + at * row_tile);
            }
#pragma omp for schedule(monotonic : dynamic, 1) collapse(2)
        for (int64_t segment = 0; segment < segment_count; segment++)
            for (int64_t head = 0; head < heads; head++) {
                int64_t first = segments[2 * segment], end = segments[2 * segment + 1];
                int64_t part = (head * tile_count + first) * row_tile, count = (end - first) * row_tile;
                memset(dk_parts + part, 0, sizeof(float) * count);
                memset(dv_parts + part, 0, sizeof(float) * count);
                Queries x[CHUNK];
                for (int64_t chunk = first; chunk < end; chunk += CHUNK) {
                    int64_t chunk_end = chunk + CHUNK < end ? chunk + CHUNK : end;
                    for (int64_t tile = chunk; tile < chunk_end; tile++)
                        load_queries(&a, tile, head, q, out, grad_out, lse, tokens, x + (tile - chunk));
                    for (int64_t other = first; other < end; other++) {
                        int64_t at = head / group * tile_count + other, own = (head * tile_count + other) * row_tile;
                        Keys keys = {k_columns + at * column_tile, v_columns + at * column_tile, k_rows + at * row_tile,
                                     dk_parts + own, dv_parts + own};
                        for (int64_t tile = chunk; tile < chunk_end; tile++) {
                            Tile t = x[tile - chunk].tile;
                            if (tile_is_seen(&a, head, other, t.first, t.first + t.tokens))
                                backward_pair(&a, head, other, x + (tile - chunk), keys);
                        }
                    }
                    for (int64_t tile = chunk; tile < chunk_end; tile++) store_dq(&a, head, x + (tile - chunk), dq);
                }
            }
#pragma omp for schedule(static) collapse(2)
        for (int64_t head = 0; head < key_heads; head++)
            for (int64_t tile = 0; tile < tile_count; tile++) {
                sum_parts(&a, tile, head, dk_parts, 0.693147181f, dk);
                sum_parts(&a, tile, head, dv_parts, 1.0f, dv);
            }
    }
}
