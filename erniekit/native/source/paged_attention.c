// Attention of the tokens of a step to the keys and values in their blocks (Kwon et al., 2023, arXiv:2309.06180), with
// an online softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867).
#include "decode.h"

#define ROWS 8                        // queries of a tile: heads of a group, of neighbouring tokens
#define SPAN_BLOCKS 8                 // blocks whose scores are computed at once
#define SPAN (SPAN_BLOCKS * BLOCK_TOKENS)
#define VECTORS (BLOCK_TOKENS / VL)   // of the keys of a block
#define MASKED -1e30f

// The queries of a tile; row r sees the keys from first[r] to last[r].
typedef struct {
    int64_t width;  // D', channels with padding
    int64_t first[ROWS], last[ROWS];
    float peak[ROWS], sum[ROWS];
    float queries[ROWS * MAX_HEAD], out[ROWS * MAX_HEAD];
    float scores[ROWS * SPAN];
} Tile;

// scores [rows, 16] of the keys of a block, [D', 16]; its values and the next keys, as many, are asked for meanwhile.
INLINE void score_block(const int rows, const Tile* tile, const float* keys, const float* values, const float* next,
                        float* scores) {
    vf sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = splat(0);
    for (int64_t d = 0; d < tile->width; d++, keys += BLOCK_TOKENS) {
        __builtin_prefetch(values + d * BLOCK_TOKENS);
        __builtin_prefetch(next + d * BLOCK_TOKENS);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sums[r][v] += splat(tile->queries[r * tile->width + d]) * load(keys + v * VL);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) store(scores + r * SPAN + v * VL, sums[r][v]);
}

// Scores of row r become exponentials beside the row's new peak; what was summed before is scaled to it.
INLINE void exponentials(Tile* tile, int r, int64_t start, int64_t count) {
    float* scores = tile->scores + r * SPAN;
    int64_t from = tile->first[r] - start, to = tile->last[r] - start + 1;
    if (from < 0) from = 0;
    if (to > count) to = count;
    for (int64_t j = 0; j < from && j < count; j++) scores[j] = MASKED;
    for (int64_t j = to < 0 ? 0 : to; j < count; j++) scores[j] = MASKED;
    vf peaks = splat(tile->peak[r]), sums = splat(0);
    for (int64_t j = 0; j < count; j += VL) peaks = larger(peaks, load(scores + j));
    float peak = largest_of(peaks);
    for (int64_t j = 0; j < count; j += VL) {
        vf score = load(scores + j);
        vf power = choose(score <= splat(0.5f * MASKED), splat(0), exponential(score - splat(peak)));  // NaN stays NaN
        store(scores + j, power);
        sums += power;
    }
    vf before = exponential(splat(tile->peak[r] - peak));
    tile->sum[r] = tile->sum[r] * before[0] + sum_of(sums);
    tile->peak[r] = peak;
    for (int64_t d = 0; d < tile->width; d += VL) store(tile->out + r * tile->width + d, load(tile->out + r * tile->width + d) * before);
}

// out [rows, channels d ...] += exponentials [rows, count] values [count, channels], block by block
INLINE void add_values(const int rows, const int vectors, Tile* tile, int64_t d, const float* const* values, int64_t begin,
                       int64_t end) {
    vf sums[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = load(tile->out + r * tile->width + d + v * VL);
    for (int64_t j = begin; j < end; j++) {
        const float* value = values[j / BLOCK_TOKENS] + j % BLOCK_TOKENS * tile->width + d;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) sums[r][v] += splat(tile->scores[r * SPAN + j]) * load(value + v * VL);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(tile->out + r * tile->width + d + v * VL, sums[r][v]);
}

// keys, values: where those of the layer and the key head begin in each block.
INLINE void attend(const int rows, Tile* tile, const int32_t* table, float* const* blocks, int64_t keys, int64_t values) {
    int64_t first = tile->first[0], last = tile->last[0];
    for (int r = 1; r < rows; r++) {
        first = tile->first[r] < first ? tile->first[r] : first;
        last = tile->last[r] > last ? tile->last[r] : last;
    }
    for (int64_t block = first / BLOCK_TOKENS; block <= last / BLOCK_TOKENS; block += SPAN_BLOCKS) {
        int64_t count = last / BLOCK_TOKENS + 1 - block, start = block * BLOCK_TOKENS;
        if (count > SPAN_BLOCKS) count = SPAN_BLOCKS;
        const float* own[SPAN_BLOCKS];
        for (int64_t b = 0; b < count; b++) {
            const float* here = blocks[table[block + b]];
            const float* next = block + b < last / BLOCK_TOKENS ? blocks[table[block + b + 1]] : here;
            own[b] = here + values;
            score_block(rows, tile, here + keys, own[b], next + keys, tile->scores + b * BLOCK_TOKENS);
        }
        for (int r = 0; r < rows; r++) exponentials(tile, r, start, count * BLOCK_TOKENS);
        // Places without a token are left out: what another request has left in them may be anything.
        int64_t begin = first > start ? first - start : 0, end = last - start + 1;
        if (end > count * BLOCK_TOKENS) end = count * BLOCK_TOKENS;
        int64_t d = 0;
        for (; d + 2 * VL <= tile->width; d += 2 * VL) add_values(rows, 2, tile, d, own, begin, end);
        for (; d < tile->width; d += VL) add_values(rows, 1, tile, d, own, begin, end);
    }
}

// The tile of `rows` queries from row `start` on, of a sequence and a key head; row = token * group + head of the group.
static void run_tile(const Decoder* decoder, int64_t layer, const Batch* batch, const float* q, int64_t line, float* out,
                     int64_t sequence, int64_t key_head, int64_t start, int rows) {
    int64_t group = decoder->heads / decoder->key_heads, size = decoder->head_dim, width = padded_head(size);
    int64_t window = decoder->layers[layer].window;
    int64_t keys = layer * 2 * block_keys(decoder) + key_head * width * BLOCK_TOKENS, values = keys + block_keys(decoder);
    Tile tile;
    tile.width = width;
    int padded = rows <= 2 ? rows : rows <= 4 ? 4 : 8;  // the rows that are added repeat the first one
    memset(tile.out, 0, sizeof(float) * padded * width);
    for (int r = 0; r < padded; r++) {
        int64_t row = start + (r < rows ? r : 0), token = row / group, head = key_head * group + row % group;
        const float* from = q + (batch->starts[sequence] + token) * line + head * size;
        for (int64_t d = 0; d < size; d++) tile.queries[r * width + d] = from[d] * decoder->attention_scale;
        for (int64_t d = size; d < width; d++) tile.queries[r * width + d] = 0;
        tile.last[r] = batch->cached[sequence] + token;
        tile.first[r] = window && tile.last[r] >= window ? tile.last[r] - window + 1 : 0;
        tile.peak[r] = MASKED, tile.sum[r] = 0;
    }
    const int32_t* table = batch->block_tables + sequence * batch->longest_table;
    switch (padded) {
        case 1: attend(1, &tile, table, batch->blocks, keys, values); break;
        case 2: attend(2, &tile, table, batch->blocks, keys, values); break;
        case 4: attend(4, &tile, table, batch->blocks, keys, values); break;
        default: attend(8, &tile, table, batch->blocks, keys, values);
    }
    for (int r = 0; r < rows; r++) {
        int64_t row = start + r;
        float* to = out + ((batch->starts[sequence] + row / group) * decoder->heads + key_head * group + row % group) * size;
        for (int64_t d = 0; d < size; d++) to[d] = tile.out[r * width + d] / tile.sum[r];
    }
}

void decode_attention(Team team, const Decoder* decoder, int64_t layer, const Batch* batch, const float* q, int64_t line,
                      float* out) {
    int64_t group = decoder->heads / decoder->key_heads, before = 0, sequence = 0;
    // Items are (sequence, tile, key head), in this order; each thread takes the next one when it is free.
    for (;;) {
        int64_t item = atomic_fetch_add(&team.meeting->next_item, 1), rows = 0, items = 0;
        for (; sequence < batch->sequences; sequence++, before += items) {
            rows = (batch->starts[sequence + 1] - batch->starts[sequence]) * group;
            items = (rows + ROWS - 1) / ROWS * decoder->key_heads;
            if (item < before + items) break;
        }
        if (sequence == batch->sequences) return;
        int64_t start = (item - before) / decoder->key_heads * ROWS;
        run_tile(decoder, layer, batch, q, line, out, sequence, (item - before) % decoder->key_heads, start,
                 (int)(rows - start < ROWS ? rows - start : ROWS));
    }
}
