// Weights out of a file: read, widened to float32, transposed and looked through for NaN and infinities in one pass.
// Values are read, not mapped: a file that is cut meanwhile is an error then, not the end of the process, and touched
// pages of a map would count as its memory.
#define _GNU_SOURCE  // pread, madvise
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simd.h"

enum stored_type { F32, BF16, F16 };
enum problem { NOT_FINITE = 1, NOT_READ = 2 };
enum { BLOCK_BYTES = 1 << 19, PAGE = 1 << 12, POPULATED_BYTES = 1 << 20 };

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

INLINE int64_t stored_bytes(int type) { return type == F32 ? 4 : 2; }

typedef uint16_t vu16 __attribute__((vector_size(2 * VL)));

INLINE vi choose_int(vi mask, vi yes, vi no) { return (mask & yes) | (~mask & no); }  // mask: 0 or -1

INLINE vf values_at(int type, const char* values) {  // VL of them
    if (type == F32) return load((const float*)values);
    vu16 narrow;
    memcpy(&narrow, values, sizeof narrow);
    vi bits = __builtin_convertvector(narrow, vi);
    if (type == BF16) return as_float(bits << 16);
    vi magnitude = (bits & 0x7fff) << 13;
    vf subnormal = as_float(magnitude + (113 << 23)) - splat(0x1p-14f);
    vi normal = choose_int(magnitude >= 0x0f800000, magnitude | 0x7f800000, magnitude + (112 << 23));
    vi value = choose_int(magnitude < 0x00800000, as_int(subnormal), normal);
    return as_float(value | (bits & 0x8000) << 16);
}

INLINE float value_at(int type, const char* value) {
    char values[4 * VL] = {0};
    memcpy(values, value, stored_bytes(type));
    return values_at(type, values)[0];
}

INLINE vi not_finite(vf x) { return (as_int(x) & 0x7f800000) == 0x7f800000; }

// out[column, row] of `rows` rows at `values`; `stride` between the rows of out
INLINE vi place_transposed(int type, int64_t rows, int64_t columns, const char* values, float* out, int64_t stride) {
    vi bad = {0};
    int64_t size = stored_bytes(type), bytes = columns * size;
    int64_t full_rows = rows / VL * VL, full_columns = columns / VL * VL;
    for (int64_t c = 0; c < full_columns; c += VL)
        for (int64_t r = 0; r < full_rows; r += VL) {
            vf tile[VL];
            for (int k = 0; k < VL; k++) {
                tile[k] = values_at(type, values + (r + k) * bytes + c * size);
                bad |= not_finite(tile[k]);
            }
            transpose(tile);
            for (int k = 0; k < VL; k++) store(out + (c + k) * stride + r, tile[k]);
        }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = r < full_rows ? full_columns : 0; c < columns; c++) {
            float value = value_at(type, values + r * bytes + c * size);
            bad |= not_finite(splat(value));
            out[c * stride + r] = value;
        }
    return bad;
}

// `values` may be `out` itself, of float32
INLINE vi place(int type, int64_t count, const char* values, float* out) {
    vi bad = {0};
    int64_t size = stored_bytes(type);
    for (int64_t i = 0; i < count / VL * VL; i += VL) {
        vf wide = values_at(type, values + i * size);
        bad |= not_finite(wide);
        if (values != (char*)out) store(out + i, wide);
    }
    for (int64_t i = count / VL * VL; i < count; i++) {
        out[i] = value_at(type, values + i * size);
        bad |= not_finite(splat(out[i]));
    }
    return bad;
}

static int read_bytes(int file, char* bytes, int64_t count, int64_t offset) {
    while (count > 0) {
        ssize_t done = pread(file, bytes, count, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return 0;
        bytes += done, offset += done, count -= done;
    }
    return 1;
}

static int read_rows(int file, char* block, int64_t rows, int64_t bytes, int64_t offset, int64_t stride) {
    if (bytes == stride) return read_bytes(file, block, rows * bytes, offset);
    for (int64_t r = 0; r < rows; r++)
        if (!read_bytes(file, block + r * bytes, bytes, offset + r * stride)) return 0;
    return 1;
}

static vi place_block(int type, int transposed, int64_t rows, int64_t columns, const char* block, float* out,
                      int64_t stride) {
    if (transposed) {
        if (type == F32) return place_transposed(F32, rows, columns, block, out, stride);
        if (type == BF16) return place_transposed(BF16, rows, columns, block, out, stride);
        return place_transposed(F16, rows, columns, block, out, stride);
    }
    if (type == F32) return place(F32, rows * columns, block, out);
    if (type == BF16) return place(BF16, rows * columns, block, out);
    return place(F16, rows * columns, block, out);
}

// Get the memory of an array from the system at once, which takes a third less time than page by page as it is written.
// A kernel before Linux 5.14 refuses, and nothing is lost.
static void populate(float* out, int64_t count) {
    uintptr_t first = ((uintptr_t)out + PAGE - 1) / PAGE * PAGE, end = (uintptr_t)(out + count) / PAGE * PAGE;
    if (end <= first) return;
    int64_t parts = (end - first + POPULATED_BYTES - 1) / POPULATED_BYTES;
#pragma omp parallel for schedule(static) if (parts > 1)
    for (int64_t p = 0; p < parts; p++) {
        uintptr_t begin = first + p * POPULATED_BYTES;
        madvise((void*)begin, end - begin < POPULATED_BYTES ? end - begin : POPULATED_BYTES, MADV_POPULATE_WRITE);
    }
}

// out [rows, columns], or its transpose, from a matrix in a file; its rows begin `stride` values apart at `offset` bytes
void read_matrix(int32_t file, int64_t offset, int32_t type, int64_t rows, int64_t columns, int64_t stride,
                 int32_t transposed, float* out, int64_t* problems) {
    int64_t size = stored_bytes(type), bytes = columns * size, found = 0;
    int64_t block_rows = BLOCK_BYTES / bytes / VL * VL;
    if (block_rows < VL) block_rows = VL;
    if (block_rows > rows) block_rows = rows;
    int64_t blocks = (rows + block_rows - 1) / block_rows;
    populate(out, rows * columns);
    int in_place = type == F32 && !transposed;  // then a block is read to where it belongs
#pragma omp parallel reduction(| : found) if (blocks > 1)
    {
        char* own = in_place ? NULL : malloc(block_rows * bytes);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t first = b * block_rows, count = rows - first < block_rows ? rows - first : block_rows;
            float* target = out + first * (transposed ? 1 : columns);
            char* block = in_place ? (char*)target : own;
            if (!block || !read_rows(file, block, count, bytes, offset + first * stride * size, stride * size)) {
                found |= NOT_READ;
                continue;
            }
            vi bad = place_block(type, transposed, count, columns, block, target, rows);
            for (int k = 0; k < VL; k++) found |= bad[k] ? NOT_FINITE : 0;
        }
        free(own);
    }
    *problems = found;
}
