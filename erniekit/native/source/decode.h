// What the step of a decoder is given: weights, a batch, key-value blocks. native_step.py has the same structures.
#pragma once
#include <stdatomic.h>
#include "simd.h"
#include "threads.h"

#define BLOCK_TOKENS 16  // of a key-value block, as in inference/decoding/step.py
#define FEW_ROWS 64      // products of more rows go to MKL, which is no faster below
#define MAX_HEAD 512     // channels of a head, at most
#define PRODUCTS 3       // between two meetings of threads, at most

// How the weight of a product lies in memory.
enum Form {
    INPUTS_FIRST,   // float32 [in, out], as linear layers have it
    OUTPUTS_FIRST,  // float32 [out, in], as the head has it
    BYTES,          // int8 [out, in], a scale for each output
    NIBBLES,        // two codes to a byte [out, in / 2], the even input in the lower half; a scale for each group
    BF16,           // bfloat16 [out, in], as files have it
};

// y = (x W + lora_scale (x A) B) column_scale + bias. What is NULL is left out.
typedef struct {
    int64_t form, inputs, outputs;
    const void* weight;
    const float* scales;  // [out], or [out, in / group]
    const float* levels;  // [16], of codes of 4 bits, in units of the scale
    int64_t group;        // inputs that share a scale
    const float* bias;    // [out]
    const float *lora_a, *lora_b;  // [in, rank], [rank, out]
    int64_t rank;
    float lora_scale;
    const float* column_scale;  // [out]
} Linear;

typedef struct {
    const float *attention_input_norm, *attention_output_norm, *mlp_input_norm, *mlp_output_norm;  // [H]
    const float *query_norm, *key_norm;  // [D], or of the whole projection
    Linear query, key, value, output, gate, up, down;  // without `up`, `gate` has both, gates first
    int64_t window;  // a query sees so many positions, its own included; 0: all
    int64_t rope;    // the number of the rope table; -1: nothing is turned
} Layer;

typedef void Sgemm(int layout, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a, int lda,
                   const float* b, int ldb, float beta, float* c, int ldc);

typedef struct {
    int64_t hidden, heads, key_heads, head_dim, inner, vocabulary, layer_count, rope_count;
    int64_t norm_whole;   // query_norm and key_norm are of the whole projection
    int64_t interleaved;  // rotary embeddings turn channels (2i, 2i + 1); otherwise (i, i + D / 2)
    int64_t activation;   // an `Activation` of activation.h
    int64_t embedding_form;  // OUTPUTS_FIRST or BF16
    float epsilon, embedding_scale, residual_scale, attention_scale;
    const void* embedding;     // [V, H], float32 or bfloat16
    const float* norm;         // [H]
    const float* frequencies;  // [ropes, D / 2]
    const float* magnitudes;   // [ropes], of the channels that turn
    const Layer* layers;
    Linear head;
    Sgemm* sgemm;  // MKL's cblas_sgemm; NULL: there is none
} Decoder;

// The fields of StepBatch (inference/decoding/step.py).
typedef struct {
    int64_t tokens, sequences, wanted_count, longest_table;
    const int64_t *token_ids, *positions;
    const float* embedded;  // [T, H] in place of token_ids; NULL: look them up
    const int32_t *starts, *cached, *block_tables;
    const int64_t* wanted;
    float* const* blocks;  // the memory of each: of every layer keys [K, D', 16], then values [K, 16, D']; D' from padded_head
} Batch;

// The threads of a step, all of which run it from its beginning to its end and meet at barriers.
typedef struct {
    _Alignas(64) atomic_int arrived;
    atomic_int round;
    _Alignas(64) atomic_int next_item, next_column[PRODUCTS];  // apart from what waiting threads read
} Meeting;
typedef struct {
    int me, all;
    Meeting* meeting;
} Team;

void decode_meet(Team team);
INLINE Range share(Team team, int64_t count, int64_t unit) { return share_of(team.me, team.all, count, unit); }
INLINE int64_t padded_head(int64_t head_dim) { return (head_dim + BLOCK_TOKENS - 1) / BLOCK_TOKENS * BLOCK_TOKENS; }
// The numbers of the keys of a block in one layer; so many are its values.
INLINE int64_t block_keys(const Decoder* d) { return d->key_heads * padded_head(d->head_dim) * BLOCK_TOKENS; }

// This thread's columns of y [rows, outputs], lines of y `line` apart. Afterwards the threads have to meet.
// number: of the product since they met. spare: of each thread apart, decode_spare(w, rows) numbers.
void decode_linear(Team team, int number, Sgemm* sgemm, const Linear* w, int64_t rows, const float* x, int64_t x_line,
                   float* y, int64_t line, float* spare);
int64_t decode_spare(const Linear* w, int64_t rows);

// out [T, N D]: the attention of all tokens to what is in the blocks, their own keys included. q: [T, N D], lines apart.
void decode_attention(Team team, const Decoder* decoder, int64_t layer, const Batch* batch, const float* q, int64_t line,
                      float* out);
