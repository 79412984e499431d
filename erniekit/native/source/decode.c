// One step of a plain decoder over key-value blocks, from token ids to logits, in one parallel region.
// Shapes: T tokens, H hidden size, N query heads, K key heads, D head size, I inner size.
#include <immintrin.h>
#include <sched.h>

#include "activation.h"
#include "decode.h"
#include "norm.h"

#define GROUP_ROWS 24  // tokens of a group of threads, at least
#define SPINS 4000     // before a waiting thread lets others have its core

static void begin_anew(Meeting* meeting) {
    atomic_store(&meeting->next_item, 0);
    for (int i = 0; i < PRODUCTS; i++) atomic_store(&meeting->next_column[i], 0);
}

// Wait for all threads of the team.
void decode_meet(Team team) {
    if (team.all == 1) {
        begin_anew(team.meeting);
        return;
    }
    int round = atomic_load(&team.meeting->round);
    if (atomic_fetch_add(&team.meeting->arrived, 1) + 1 == team.all) {
        atomic_store(&team.meeting->arrived, 0);
        begin_anew(team.meeting);
        atomic_store(&team.meeting->round, round + 1);
        return;
    }
    for (int spins = 0; atomic_load(&team.meeting->round) == round; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
}

// Where the numbers of a step lie; each is [T, ...].
typedef struct {
    float *x, *normed;           // [H]
    float *qkv;                  // [(N + 2 K) D]: queries, keys, values
    float *attended;             // [N D]
    float *gates;                // [2 I]: gates, then what they multiply
    float *cosines, *sines;      // [ropes, D / 2]
    float *spare;                // of each thread
    int64_t spare_size;
} Work;

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

// The numbers of `memory` that a step of so many tokens and threads needs; with `memory` also where they lie.
static int64_t place(const Decoder* d, int64_t tokens, int64_t threads, float* memory, Work* work) {
    int64_t used = 0, pairs = d->rope_count * d->head_dim / 2;
    struct { float** at; int64_t size; } parts[] = {
        {&work->x, tokens * d->hidden},
        {&work->normed, tokens * d->hidden},
        {&work->qkv, tokens * (d->heads + 2 * d->key_heads) * d->head_dim},
        {&work->attended, tokens * d->heads * d->head_dim},
        {&work->gates, tokens * 2 * d->inner},
        {&work->cosines, tokens * pairs},
        {&work->sines, tokens * pairs},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; used += parts[i++].size) *parts[i].at = memory + used;
    work->spare = memory + used;
    work->spare_size = decode_spare(&d->head, tokens);
    for (int64_t l = 0; l < d->layer_count; l++) {
        const Layer* layer = d->layers + l;
        const Linear* linears[] = {&layer->query, &layer->key, &layer->value, &layer->output,
                                   &layer->gate, &layer->up, &layer->down};
        for (int i = 0; i < 7; i++) work->spare_size = largest(work->spare_size, decode_spare(linears[i], tokens));
    }
    work->spare_size = (work->spare_size + 31) / 32 * 32;  // threads write to lines of the cache of their own
    return used + work->spare_size * threads;
}

static void norm_rows(const float* weight, const Decoder* d, Range tokens, const float* x, float* y) {
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        if (weight) norm_row(d->hidden, x + t * d->hidden, weight, d->epsilon, y + t * d->hidden);
        else if (x != y) memcpy(y + t * d->hidden, x + t * d->hidden, sizeof(float) * d->hidden);
    }
}

// x += residual_scale norm(branch)
static void add_branch(const float* weight, const Decoder* d, Range tokens, float* branch, float* x) {
    norm_rows(weight, d, tokens, branch, branch);
    for (int64_t i = tokens.begin * d->hidden; i < tokens.end * d->hidden; i++) x[i] += branch[i] * d->residual_scale;
}

static void embed(const Decoder* d, const Batch* batch, Range tokens, float* x) {
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        float* to = x + t * d->hidden;
        if (batch->embedded) {
            memcpy(to, batch->embedded + t * d->hidden, sizeof(float) * d->hidden);
            continue;
        }
        int64_t row = batch->token_ids[t] * d->hidden;
        if (d->embedding_form == BF16)
            for (int64_t i = 0; i < d->hidden; i++) to[i] = widened(((const uint16_t*)d->embedding)[row + i]);
        else memcpy(to, (const float*)d->embedding + row, sizeof(float) * d->hidden);
        multiply_by(d->hidden, d->embedding_scale, to);
    }
}

// Cosines and sines of the angles position * frequency, as in model/rope.py
static void rope_tables(const Decoder* d, const Batch* batch, Range tokens, const Work* work) {
    int64_t half = d->head_dim / 2;
    for (int64_t t = tokens.begin; t < tokens.end; t++)
        for (int64_t i = 0; i < d->rope_count * half; i++) {
            float frequency = d->frequencies[i], angle = (float)batch->positions[t] * frequency;
            float magnitude = frequency == 0.0f ? 1.0f : d->magnitudes[i / half];
            work->cosines[t * d->rope_count * half + i] = cosf(angle) * magnitude;
            work->sines[t * d->rope_count * half + i] = sinf(angle) * magnitude;
        }
}

static void rotate(const Decoder* d, float* head, const float* cosines, const float* sines) {
    int64_t half = d->head_dim / 2, step = d->interleaved ? 2 : 1, apart = d->interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        float *a = head + i * step, *b = a + apart, x = *a, y = *b;
        *a = x * cosines[i] - y * sines[i];
        *b = y * cosines[i] + x * sines[i];
    }
}

// Normalise and turn the queries and keys of some tokens, and write keys and values to their blocks.
static void finish_heads(const Decoder* d, int64_t number, const Batch* batch, Range tokens, const Work* work) {
    const Layer* layer = d->layers + number;
    int64_t size = d->head_dim, width = padded_head(size), queries = d->heads * size, keys = d->key_heads * size;
    int64_t line = queries + 2 * keys, sequence = 0;
    for (int64_t t = tokens.begin; t < tokens.end; t++) {
        float* row = work->qkv + t * line;
        if (layer->query_norm && d->norm_whole) {
            norm_row(queries, row, layer->query_norm, d->epsilon, row);
            norm_row(keys, row + queries, layer->key_norm, d->epsilon, row + queries);
        }
        for (int64_t head = 0; head < d->heads + d->key_heads; head++) {
            float* own = row + head * size;
            if (layer->query_norm && !d->norm_whole)
                norm_row(size, own, head < d->heads ? layer->query_norm : layer->key_norm, d->epsilon, own);
            if (layer->rope >= 0) {
                int64_t table = (t * d->rope_count + layer->rope) * (size / 2);
                rotate(d, own, work->cosines + table, work->sines + table);
            }
        }
        while (batch->starts[sequence + 1] <= t) sequence++;
        int64_t place = batch->cached[sequence] + t - batch->starts[sequence], slot = place % BLOCK_TOKENS;
        int64_t block = batch->block_tables[sequence * batch->longest_table + place / BLOCK_TOKENS];
        float *to_keys = batch->blocks[block] + number * 2 * block_keys(d), *to_values = to_keys + block_keys(d);
        for (int64_t head = 0; head < d->key_heads; head++) {
            const float *key = row + queries + head * size, *value = key + keys;
            for (int64_t i = 0; i < size; i++) to_keys[(head * width + i) * BLOCK_TOKENS + slot] = key[i];
            memcpy(to_values + (head * BLOCK_TOKENS + slot) * width, value, sizeof(float) * size);
        }
    }
}

// What joins gates and up, of some channels, written over the gates
static void activate_tokens(const Decoder* d, Range channels, int64_t tokens, float* gates) {
    for (int64_t t = 0; t < tokens; t++) {
        float* gate = gates + t * 2 * d->inner;
        activate(d->activation, channels, gate, gate + d->inner, gate);
    }
}

static void run_layer(Team team, const Decoder* d, int64_t number, const Batch* batch, const Work* work) {
    const Layer* layer = d->layers + number;
    int64_t tokens = batch->tokens, size = d->head_dim, line = (d->heads + 2 * d->key_heads) * size;
    Range own = share(team, tokens, 1);
    float* spare = work->spare + team.me * work->spare_size;
    norm_rows(layer->attention_input_norm, d, own, work->x, work->normed);
    decode_meet(team);
    float* at = work->qkv;
    int product = 0;
    for (const Linear* w = &layer->query; w <= &layer->value; at += w++->outputs)
        decode_linear(team, product++, d->sgemm, w, tokens, work->normed, d->hidden, at, line, spare);
    decode_meet(team);
    finish_heads(d, number, batch, own, work);
    decode_meet(team);
    decode_attention(team, d, number, batch, work->qkv, line, work->attended);
    decode_meet(team);
    decode_linear(team, 0, d->sgemm, &layer->output, tokens, work->attended, d->heads * size, work->normed, d->hidden, spare);
    decode_meet(team);
    add_branch(layer->attention_output_norm, d, own, work->normed, work->x);
    norm_rows(layer->mlp_input_norm, d, own, work->x, work->normed);
    decode_meet(team);
    decode_linear(team, 0, d->sgemm, &layer->gate, tokens, work->normed, d->hidden, work->gates, 2 * d->inner, spare);
    if (layer->up.outputs)
        decode_linear(team, 1, d->sgemm, &layer->up, tokens, work->normed, d->hidden, work->gates + d->inner, 2 * d->inner, spare);
    decode_meet(team);
    activate_tokens(d, share(team, d->inner, VL), tokens, work->gates);
    decode_meet(team);
    decode_linear(team, 0, d->sgemm, &layer->down, tokens, work->gates, 2 * d->inner, work->normed, d->hidden, spare);
    decode_meet(team);
    add_branch(layer->mlp_output_norm, d, own, work->normed, work->x);
}

static void run(Team team, const Decoder* d, const Batch* batch, const Work* work, float* logits) {
    Range own = share(team, batch->tokens, 1);
    embed(d, batch, own, work->x);
    rope_tables(d, batch, own, work);
    for (int64_t layer = 0; layer < d->layer_count; layer++) run_layer(team, d, layer, batch, work);
    decode_meet(team);
    Range rows = share(team, batch->wanted_count, 1);
    for (int64_t r = rows.begin; r < rows.end; r++)
        norm_row(d->hidden, work->x + batch->wanted[r] * d->hidden, d->norm, d->epsilon, work->normed + r * d->hidden);
    decode_meet(team);
    decode_linear(team, 0, d->sgemm, &d->head, batch->wanted_count, work->normed, d->hidden, logits, d->vocabulary,
                  work->spare + team.me * work->spare_size);
}

// The threads of a step, and the float32 numbers that it needs for so many tokens beside its arguments.
void decode_memory(const Decoder* decoder, int64_t tokens, int64_t* threads, int64_t* size) {
    Work work;
    *threads = omp_get_max_threads();
    *size = place(decoder, tokens, *threads, 0, &work);
}

// The part of a batch that its sequences from `first` to `last` are, of FEW_ROWS tokens at most.
typedef struct {
    Batch batch;
    int32_t starts[FEW_ROWS + 1];
    int64_t wanted[FEW_ROWS];
    int64_t wanted_before;
} Part;

static void take_part(const Decoder* d, const Batch* whole, int64_t first, int64_t last, Part* part) {
    int64_t begin = whole->starts[first], end = whole->starts[last], count = 0;
    Batch* own = &part->batch;
    *own = *whole;
    own->tokens = end - begin, own->sequences = last - first;
    own->token_ids += begin, own->positions += begin, own->cached += first;
    own->block_tables += first * whole->longest_table;
    if (own->embedded) own->embedded += begin * d->hidden;
    for (int64_t s = first; s <= last; s++) part->starts[s - first] = (int32_t)(whole->starts[s] - begin);
    part->wanted_before = 0;
    for (int64_t r = 0; r < whole->wanted_count; r++) {
        if (whole->wanted[r] < begin) part->wanted_before++;
        else if (whole->wanted[r] < end) part->wanted[count++] = whole->wanted[r] - begin;
    }
    own->starts = part->starts, own->wanted = part->wanted, own->wanted_count = count;
}

// The first sequence of group `number`; groups have about as many tokens.
static int64_t first_of(const Batch* batch, int64_t number, int64_t groups) {
    int64_t sequence = 0;
    while (batch->starts[sequence] * groups < batch->tokens * number) sequence++;
    return sequence;
}

// Groups of threads that each take some sequences from the beginning of a step to its end, for whose rows it pays to read
// all weights: they need not wait for each other, nor fetch what others have computed. 1: all threads divide columns.
// Results are the same, so that more tokens, whose products MKL computes, are not divided.
static int64_t groups_of(const Batch* batch, int64_t threads) {
    int64_t groups = batch->tokens > FEW_ROWS ? 1 : batch->tokens / GROUP_ROWS;
    if (groups > threads) groups = threads;
    for (; groups > 1; groups--) {
        int64_t most = 0;
        for (int64_t g = 0; g < groups; g++)
            most = largest(most, batch->starts[first_of(batch, g + 1, groups)] - batch->starts[first_of(batch, g, groups)]);
        if (threads % groups == 0 && most * groups <= batch->tokens * 5 / 4) return groups;
    }
    return 1;
}

// The share of thread `me` of `all` threads: in a group's part of the batch.
static void run_share(int me, int all, const Decoder* d, const Batch* batch, Meeting* meetings, float* memory, float* logits) {
    int64_t groups = groups_of(batch, all), own = me * groups / all;
    int team = (int)(all / groups);
    Part part;
    Work work;
    for (int64_t g = 0; g < own; g++) {
        int64_t tokens = batch->starts[first_of(batch, g + 1, groups)] - batch->starts[first_of(batch, g, groups)];
        memory += place(d, tokens, team, memory, &work);
    }
    if (groups > 1) {
        take_part(d, batch, first_of(batch, own, groups), first_of(batch, own + 1, groups), &part);
        batch = &part.batch, logits += part.wanted_before * d->vocabulary;
    }
    place(d, batch->tokens, team, memory, &work);
    run((Team){(int)(me - own * team), team, meetings + own}, d, batch, &work, logits);
}

// Write keys and values of the batch's tokens to their blocks, and logits [M, V].
void decode_step(const Decoder* decoder, const Batch* batch, int64_t threads, float* memory, float* logits) {
    Meeting meetings[FEW_ROWS / GROUP_ROWS] = {{0}};
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    run_share(omp_get_thread_num(), omp_get_num_threads(), decoder, batch, meetings, memory, logits);
}
