// The threads that compute something together, and the share of each.
#pragma once
#include <stdint.h>

// Of OpenMP; its header lies with the compiler, and not with every one.
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_get_max_threads(void);

#ifdef __clang__
// Clang 19 and later call it at the end of dynamic loops; Paddle's OpenMP runtime is older and needs nothing there.
__attribute__((weak)) void __kmpc_dispatch_deinit(void* place, int32_t thread) { (void)place, (void)thread; }
#endif

typedef struct { int64_t begin, end; } Range;

// The share of thread `me` of `all` threads in `count` things, in multiples of `unit`.
static inline Range share_of(int64_t me, int64_t all, int64_t count, int64_t unit) {
    int64_t units = (count + unit - 1) / unit, begin = units * me / all * unit, end = units * (me + 1) / all * unit;
    return (Range){begin < count ? begin : count, end < count ? end : count};
}
