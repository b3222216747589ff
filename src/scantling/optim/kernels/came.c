/* One step of CAME on a CPU, all parameters in one call: the equations of came.py, (1) to (10), row by row.

   Each parameter is a stack of row-major matrices. A row is loaded into a buffer of floats from its storage format (fp32,
   bf16, codes of 8 or 4 bits), updated there and stored back, so that each stage reads memory once: the gradient three
   times (four with a rounded momentum), the momentum twice, the parameter once. Rows are distributed in chunks whose
   number does not depend on the number of threads, and their sums are added in the order of the chunks: the result is
   the same on any number of threads.

   Called by _cpu.py; every function has its PyTorch counterpart in stages.py and codecs.py. Sums run in LANES partial
   sums, so that a compiler can vectorize them without changing any other order: p + p decay must not become
   p (1 + decay), whose factor is off by up to 6e-8 in the same direction at every step. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, NONE = 4 };   /* storage of a row; NONE: no momentum, beta1 = 0 */
enum { NEAREST = 0, STOCHASTIC = 1, COMPENSATED = 2 };
enum { LANES = 16, CHUNKS = 32, BLOCK8 = 128, BLOCK4 = 64, ROWS_AT_ONCE = 64, PIECE = 1024 };
enum { SHORT_BIAS = 8 * (127 - 16) };                        /* see codecs.py */
enum { SPINS = 2000 };                                       /* of a waiting thread, some 30 microseconds */

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE()
#endif

typedef struct {                                             /* `_CStep` in _cpu.py */
    void *param, *momentum, *scale;
    int8_t *low;
    float *row, *col, *res_row, *res_col, *moment;           /* moment: full second moment, if not factored */
    const float *counter;                                    /* number of the step */
    const void *grad;
    int64_t num_matrices, rows, cols;
    int32_t param_dtype, grad_dtype, codec, rounding, debias, maximize, scale_bytes;
    uint32_t param_idx;
    double lr, beta1, beta2, beta3, eps1, eps2, clip, weight_decay;
} ParamStep;

typedef struct {
    const ParamStep *steps;
    int64_t num_steps;
    int num_threads;
    pthread_mutex_t gate;                                    /* locked until the number of threads is known */
    pthread_cond_t opened;                                   /* a new phase has begun */
    atomic_int arrived;                                      /* threads that wait for the others */
    atomic_uint phase;
    float *buffers;                                          /* (threads, 4, widest row) */
    double *col_sums;                                        /* (CHUNKS, widest row) */
    float *a, *b, *res_a, *res_b;                            /* factors of the current matrix */
    double *totals;                                          /* (CHUNKS): sums of squares of a parameter */
    int64_t widest;
} Shared;

typedef struct {
    Shared *shared;
    int index;
} Thread;

/* --- numbers ------------------------------------------------------------------------------------------------------ */

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

static inline uint32_t mix(uint32_t x) {
    x ^= x >> 16; x *= 0x7FEB352Du;
    x ^= x >> 16; x *= 0x846CA68Bu;
    return x;
}
static uint32_t noise_seed(const ParamStep *step, uint32_t stream) {
    uint32_t key = (step->param_idx * 4 + stream) * 0x9E3779B1u & 0x7FFFFFFFu;
    return mix((uint32_t)(int32_t)*step->counter * 0x7FEB352Du + key);
}
static inline uint32_t random_uint16(uint32_t seed, uint32_t element) { return mix(element * 0x846CA68Bu + seed) >> 16; }

/* The bits of a float; every NaN becomes one that stays NaN when less than 2^16 is added. */
static inline uint32_t bits_to_round(float x) { return x == x ? bits_of(x) : 0x7FC00000u; }

static inline uint16_t bf16_of(float x) {                    /* to the nearest, ties to even */
    uint32_t u = bits_of(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1)) >> 16);
}

static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FF;
    if (exponent == 31) return float_of(sign | 0x7F800000u | (mantissa << 13));
    if (exponent) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
    return float_of(sign | bits_of((float)mantissa * 5.9604644775390625e-8f));
}

static uint16_t float_to_half(float x) {                     /* x >= 0, or NaN */
    uint32_t u = bits_of(x);
    if (u > 0x7F800000u) return 0x7E00;
    if (u >= 0x477FF000u) return 0x7C00;
    if (u < 0x38800000u) return (uint16_t)lrintf(x * 16777216.0f);
    return (uint16_t)((u - 0x38000000u + 0xFFF + ((u >> 13) & 1)) >> 13);
}

/* Run the code for each element j, in lane l = j % LANES. */
#define EACH(count, ...)                                                             \
    {                                                                                \
        int64_t whole_ = (count) / LANES * LANES;                                    \
        for (int64_t k_ = 0; k_ < whole_; k_ += LANES)                               \
            for (int64_t l = 0; l < LANES; l++) { const int64_t j = k_ + l; __VA_ARGS__ }   \
        for (int64_t j = whole_; j < (count); j++) { const int64_t l = j - whole_; __VA_ARGS__ } \
    }

static double sum_of(const float *lanes) {
    double sum = 0.0;
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

static const float *load(const void *data, int dtype, int64_t start, int64_t count, float *buffer) {
    if (dtype == FP32) return (const float *)data + start;
    const uint16_t *source = (const uint16_t *)data + start;
    for (int64_t j = 0; j < count; j++) buffer[j] = float_of((uint32_t)source[j] << 16);
    return buffer;
}

static int64_t num_blocks(int codec, int64_t cols) {
    int64_t block = codec == INT8 ? BLOCK8 : BLOCK4;
    return (cols + block - 1) / block;
}

static float load_scale(const ParamStep *step, int64_t block) {
    if (step->scale_bytes == 2) return half_to_float(((const uint16_t *)step->scale)[block]);
    uint32_t code = ((const uint8_t *)step->scale)[block];
    return code == 0 ? 0.0f : code == 255 ? NAN : float_of((code + SHORT_BIAS) << 20);
}

static void store_scale(const ParamStep *step, int64_t block, int32_t bits) {   /* of the largest magnitude */
    if (step->scale_bytes == 2) {
        ((uint16_t *)step->scale)[block] = float_to_half(float_of((uint32_t)bits));
        return;
    }
    int32_t code = ((bits - 1) >> 20) + 1 - SHORT_BIAS;
    ((uint8_t *)step->scale)[block] = (uint8_t)(code < 1 ? 1 : code > 255 ? 255 : code);
}

/* Unpack 4-bit codes by way of bytes, which compilers can vectorize. A row of odd length has one unused code. */
static inline void unpack(const uint8_t *restrict codes, int64_t count, float scale, float *restrict value) {
    enum { HALF = BLOCK4 / 2 };                              /* vectors that are read back as they were written */
    uint8_t levels[BLOCK4];
    for (int64_t j = 0; j < (count + 1) / 2; j++) {
        levels[2 * j] = codes[j] & 15;
        levels[2 * j + 1] = codes[j] >> 4;
    }
    for (int64_t first = 0; first < count; first += HALF) {
        int64_t some = count - first < HALF ? count - first : HALF;
        for (int64_t j = first; j < first + some; j++) value[j] = ((float)levels[j] - 8.0f) * (1.0f / 7.0f) * scale;
    }
}

/* Encode values from -1 to 1 in 4 bits, rounded by the noise of their elements. */
static inline void pack(const float *restrict value, int64_t count, uint32_t seed, uint32_t element, uint8_t *restrict codes) {
    uint8_t levels[BLOCK4];
    for (int64_t j = 0; j < count; j++) {
        float noise = (float)random_uint16(seed, element + (uint32_t)j) * (1.0f / 65536.0f);
        float level = floorf(value[j] * 7.0f + noise) + 8.0f;
        level = level > 15.0f ? 15.0f : level;
        levels[j] = (uint8_t)(level < 1.0f ? 1.0f : level);
    }
    if (count % 2) levels[count] = 8;
    for (int64_t j = 0; j < (count + 1) / 2; j++) codes[j] = (uint8_t)(levels[2 * j] | levels[2 * j + 1] << 4);
}

static float *load_momentum(const ParamStep *step, int64_t index, float *buffer) {
    int64_t cols = step->cols;
    if (step->codec == FP32) return (float *)step->momentum + index * cols;
    if (step->codec == NONE) return memset(buffer, 0, (size_t)cols * sizeof(float));
    if (step->codec == BF16) return (float *)load(step->momentum, BF16, index * cols, cols, buffer);
    int64_t blocks = num_blocks(step->codec, cols);
    if (step->codec == INT8) {
        const int8_t *codes = (const int8_t *)step->momentum + index * cols;
        for (int64_t k = 0; k < blocks; k++) {
            float scale = load_scale(step, index * blocks + k);
            int64_t end = (k + 1) * BLOCK8 < cols ? (k + 1) * BLOCK8 : cols;
            for (int64_t j = k * BLOCK8; j < end; j++) {
                float y = (float)codes[j] * (1.0f / 127.0f);
                buffer[j] = y / (2.0f - fabsf(y)) * scale;
            }
        }
    } else {
        const uint8_t *codes = (const uint8_t *)step->momentum + index * ((cols + 1) / 2);
        for (int64_t k = 0; k < blocks; k++) {
            float scale = load_scale(step, index * blocks + k);
            int64_t end = (k + 1) * BLOCK4 < cols ? (k + 1) * BLOCK4 : cols;
            int64_t count = end - k * BLOCK4;
            if (count == BLOCK4) unpack(codes + k * (BLOCK4 / 2), BLOCK4, scale, buffer + k * BLOCK4);
            else unpack(codes + k * (BLOCK4 / 2), count, scale, buffer + k * BLOCK4);
        }
    }
    return buffer;
}

static void store_momentum(const ParamStep *step, int64_t index, float *value) {
    int64_t cols = step->cols;
    if (step->codec == FP32 || step->codec == NONE) return;
    if (step->codec == BF16) {
        uint16_t *target = (uint16_t *)step->momentum + index * cols;
        for (int64_t j = 0; j < cols; j++) target[j] = bf16_of(value[j]);
        return;
    }
    int64_t block = step->codec == INT8 ? BLOCK8 : BLOCK4, blocks = num_blocks(step->codec, cols);
    for (int64_t k = 0; k < blocks; k++) {
        int64_t begin = k * block, end = begin + block < cols ? begin + block : cols;
        int32_t largest = 0;                                 /* bits of magnitudes sort like the magnitudes, NaN last */
        for (int64_t j = begin; j < end; j++) {
            int32_t x = (int32_t)(bits_of(value[j]) & 0x7FFFFFFFu);
            largest = x > largest ? x : largest;
        }
        store_scale(step, index * blocks + k, largest);
        float scale = load_scale(step, index * blocks + k);
        scale = scale < 5.9604644775390625e-8f ? 5.9604644775390625e-8f : scale;
        for (int64_t j = begin; j < end; j++) {
            float x = value[j] / scale;
            x = x > 1.0f ? 1.0f : x;
            value[j] = x < -1.0f ? -1.0f : x;
        }
    }
    if (step->codec == INT8) {
        int8_t *codes = (int8_t *)step->momentum + index * cols;
        for (int64_t j = 0; j < cols; j++) codes[j] = (int8_t)rintf(value[j] / (1.0f + fabsf(value[j])) * 254.0f);
        return;
    }
    uint8_t *codes = (uint8_t *)step->momentum + index * ((cols + 1) / 2);
    uint32_t element = (uint32_t)(index * cols), seed = noise_seed(step, 0);
    for (int64_t k = 0; k < blocks; k++) {
        int64_t begin = k * BLOCK4;
        if (begin + BLOCK4 <= cols) pack(value + begin, BLOCK4, seed, element + (uint32_t)begin, codes + begin / 2);
        else pack(value + begin, cols - begin, seed, element + (uint32_t)begin, codes + begin / 2);
    }
}

static float *load_weight(const ParamStep *step, int64_t start, int64_t count, float *buffer) {
    if (step->rounding != COMPENSATED || step->param_dtype == FP32)
        return (float *)load(step->param, step->param_dtype, start, count, buffer);
    const uint16_t *high = (const uint16_t *)step->param + start;
    const int8_t *low = step->low + start;
    for (int64_t j = 0; j < count; j++) buffer[j] = float_of(((uint32_t)high[j] << 16) + ((uint32_t)(int32_t)low[j] << 8));
    return buffer;
}

static void store_weight(const ParamStep *step, int64_t start, int64_t count, const float *value) {
    if (step->param_dtype == FP32) return;
    uint16_t *target = (uint16_t *)step->param + start;
    if (step->rounding == STOCHASTIC) {
        uint32_t seed = noise_seed(step, 1);
        for (int64_t j = 0; j < count; j++)
            target[j] = (uint16_t)((bits_to_round(value[j]) + random_uint16(seed, (uint32_t)(start + j))) >> 16);
    } else if (step->rounding == COMPENSATED) {
        int8_t *low = step->low + start;
        for (int64_t j = 0; j < count; j++) {
            int32_t bits = (int32_t)bits_to_round(value[j]), high = (int32_t)((uint32_t)bits + 0x8000u) >> 16;
            int32_t rest = ((int32_t)((uint32_t)bits - ((uint32_t)high << 16)) + 0x80) >> 8;
            target[j] = (uint16_t)high;
            low[j] = (int8_t)(rest > 127 ? 127 : rest);
        }
    } else {
        for (int64_t j = 0; j < count; j++) target[j] = bf16_of(value[j]);
    }
}

/* --- stages ------------------------------------------------------------------------------------------------------- */

static void part_of(int64_t count, int part, int parts, int64_t *begin, int64_t *end) {
    *begin = count * part / parts;
    *end = count * (part + 1) / parts;
}

static double correction(const ParamStep *step, double beta) {
    return step->debias ? (beta == 0.0 ? 1.0 : -expm1((double)*step->counter * log(beta))) : 1.0;
}

/* Factors a and b of (row col / mean(row))^(-1/2) for (3) and (9), times `scale`: this thread's part of them. */
static void inverse_root(const Thread *t, const float *row, const float *col, int64_t rows, int64_t cols, double scale,
                         float *a, float *b) {
    int64_t begin, end;
    double mean = 0.0;
    for (int64_t i = 0; i < rows; i++) mean += row[i];
    float root = (float)(sqrt(mean / (double)rows) * scale);
    part_of(rows, t->index, t->shared->num_threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) a[i] = root / sqrtf(row[i]);
    part_of(cols, t->index, t->shared->num_threads, &begin, &end);
    for (int64_t j = begin; j < end; j++) b[j] = 1.0f / sqrtf(col[j]);
}

/* Largest magnitude of a gradient whose square can be added `rows` or `cols` times without overflow. */
static float bound_of(int64_t rows, int64_t cols) { return (float)(0x1p63 / sqrt((double)(rows > cols ? rows : cols))); }

/* Bound a gradient; NaN stays NaN. The square is not bounded instead, so that it is added with one rounding. */
static inline float bounded(float g, float bound) { return fabsf(g) > bound ? bound : g; }

/* (2), (8): avg <- beta avg + (1 - beta) (mean + eps) for this thread's columns, from the sums of all chunks. */
static void finish_columns(const Thread *t, float *col, int64_t cols, double beta, double eps, double weight) {
    Shared *s = t->shared;
    double *restrict total = s->col_sums;
    int64_t begin, end;
    part_of(cols, t->index, s->num_threads, &begin, &end);
    for (int chunk = 1; chunk < CHUNKS; chunk++) {
        const double *restrict sum = s->col_sums + chunk * s->widest;
        for (int64_t j = begin; j < end; j++) total[j] += sum[j];
    }
    for (int64_t j = begin; j < end; j++) col[j] = (float)(beta * col[j] + (1.0 - beta) * eps + weight * total[j]);
}

/* Sums of squares of some rows of a matrix, along rows and along columns. Bounding each element is slower. */
static inline __attribute__((always_inline)) void add_squares(const ParamStep *step, int64_t index, int64_t count, int is_bounded,
                                                              float bound, float *buffer, float *restrict sums,
                                                              double *row_sums) {
    int64_t cols = step->cols;
    memset(sums, 0, (size_t)cols * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        const float *restrict g = load(step->grad, step->grad_dtype, (index + i) * cols, cols, buffer);
        float lanes[LANES] = {0.0f};
        if (is_bounded) EACH(cols, { float x = bounded(g[j], bound), q = x * x; sums[j] += q; lanes[l] += q; })
        else EACH(cols, { float q = g[j] * g[j]; sums[j] += q; lanes[l] += q; })
        row_sums[i] = sum_of(lanes);
    }
}

/* (1) and the sums of (2) for one chunk of rows. */
static void statistics(Shared *s, const ParamStep *step, int64_t matrix, int chunk, float *buffer, float *sums) {
    int64_t begin, end, cols = step->cols;
    part_of(step->rows, chunk, CHUNKS, &begin, &end);
    float bound = bound_of(step->rows, cols);
    double *total = s->col_sums + chunk * s->widest, row_sums[ROWS_AT_ONCE];
    memset(total, 0, (size_t)cols * sizeof(double));
    for (int64_t first = begin; first < end; first += ROWS_AT_ONCE) {
        int64_t index = matrix * step->rows + first, count = end - first < ROWS_AT_ONCE ? end - first : ROWS_AT_ONCE;
        int is_large = 0;
        add_squares(step, index, count, 0, bound, buffer, sums, row_sums);
        for (int64_t i = 0; i < count; i++) is_large |= !(row_sums[i] < (double)bound * bound);
        if (is_large) add_squares(step, index, count, 1, bound, buffer, sums, row_sums);
        for (int64_t i = 0; i < count; i++) {
            double mean = row_sums[i] / (double)cols;
            step->row[index + i] = (float)(step->beta2 * step->row[index + i] + (1.0 - step->beta2) * (step->eps1 + mean));
        }
        for (int64_t j = 0; j < cols; j++) total[j] += sums[j];
    }
}

/* (3): sum of squares of u for one chunk of rows. */
static double whitened_squares(const Shared *s, const ParamStep *step, int64_t matrix, int chunk, float *buffer) {
    int64_t begin, end, cols = step->cols;
    part_of(step->rows, chunk, CHUNKS, &begin, &end);
    double total = 0.0;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict g = load(step->grad, step->grad_dtype, (matrix * step->rows + i) * cols, cols, buffer);
        const float *restrict b = s->b;
        float a = s->a[i], lanes[LANES] = {0.0f};
        EACH(cols, { float u = g[j] * a * b[j]; lanes[l] += u * u; })
        total += sum_of(lanes);
    }
    return total;
}

/* (4) to (7) and the sums of (8) for one chunk of rows. `factor` is the clip with the sign of the gradient. */
static void residual(Shared *s, const ParamStep *step, int64_t matrix, int chunk, float factor, float *buffer, float *momentum,
                     float *sums) {
    int64_t begin, end, cols = step->cols;
    part_of(step->rows, chunk, CHUNKS, &begin, &end);
    double *total = s->col_sums + chunk * s->widest;
    double weight = step->beta1 * step->beta1 * (1.0 - step->beta3) / (double)cols;
    float keep = (float)(1.0 - step->beta1);
    memset(total, 0, (size_t)cols * sizeof(double));
    for (int64_t first = begin; first < end; first += ROWS_AT_ONCE) {
        memset(sums, 0, (size_t)cols * sizeof(float));
        for (int64_t i = first; i < end && i < first + ROWS_AT_ONCE; i++) {
            int64_t index = matrix * step->rows + i;
            const float *restrict g = load(step->grad, step->grad_dtype, index * cols, cols, buffer);
            const float *restrict b = s->b;
            float *restrict m = load_momentum(step, index, momentum);
            float *restrict c = sums, a = s->a[i] * factor, lanes[LANES] = {0.0f};
            EACH(cols, {
                float d = g[j] * a * b[j] - m[j], q = d * d;
                m[j] += d * keep;
                c[j] += q;
                lanes[l] += q;
            })
            double kept = step->beta3 * step->res_row[index] + (1.0 - step->beta3) * step->eps2;
            step->res_row[index] = (float)(kept + weight * sum_of(lanes));
        }
        for (int64_t j = 0; j < cols; j++) total[j] += sums[j];
    }
}

/* p + p decay; p without decay, since an infinite weight times 0 is NaN. */
static inline float decayed(float p, float decay) { return decay != 0.0f ? p + p * decay : p; }

/* (9) and (10) for one chunk of rows. Without confidence residual() did not run: (5) is here, and D = m scale. */
static void apply(Shared *s, const ParamStep *step, int64_t matrix, int chunk, float factor, float scale, float *buffer,
                  float *momentum, float *weights) {
    int64_t begin, end, cols = step->cols;
    part_of(step->rows, chunk, CHUNKS, &begin, &end);
    float keep = (float)(1.0 - step->beta1), decay = (float)(-step->lr * step->weight_decay);
    for (int64_t i = begin; i < end; i++) {
        int64_t index = matrix * step->rows + i;
        float *restrict m = load_momentum(step, index, momentum);
        const float *restrict b = s->b;
        const float *restrict res_b = s->res_b;
        if (step->codec != FP32 || !step->res_row) {
            const float *restrict g = load(step->grad, step->grad_dtype, index * cols, cols, buffer);
            float a = s->a[i] * factor;
            for (int64_t j = 0; j < cols; j++) m[j] += (g[j] * a * b[j] - m[j]) * keep;
        }
        float *restrict p = load_weight(step, index * cols, cols, weights);
        if (step->res_row) {
            float a = s->res_a[i];
            for (int64_t j = 0; j < cols; j++) p[j] = decayed(p[j], decay) + m[j] * a * res_b[j];
        } else {
            for (int64_t j = 0; j < cols; j++) p[j] = decayed(p[j], decay) + m[j] * scale;
        }
        store_weight(step, index * cols, cols, p);
        store_momentum(step, index, m);
    }
}

/* A barrier. A stage takes some ten microseconds, as long as waking a thread: spin for a while before sleeping. */
static void wait_for_all(Shared *s) {
    unsigned phase = atomic_load(&s->phase);
    if (atomic_fetch_add(&s->arrived, 1) + 1 == s->num_threads) {
        atomic_store(&s->arrived, 0);
        pthread_mutex_lock(&s->gate);
        atomic_store(&s->phase, phase + 1);
        pthread_mutex_unlock(&s->gate);
        pthread_cond_broadcast(&s->opened);
        return;
    }
    for (int k = 0; k < SPINS; k++) {
        if (atomic_load(&s->phase) != phase) return;
        PAUSE();
    }
    pthread_mutex_lock(&s->gate);
    while (atomic_load(&s->phase) == phase) pthread_cond_wait(&s->opened, &s->gate);
    pthread_mutex_unlock(&s->gate);
}

static float clip_factor(const ParamStep *step, double total, double count) {
    double rms = sqrt(total / (count * step->clip * step->clip));
    double factor = rms > 1.0 ? 1.0 / rms : (rms == rms ? 1.0 : rms);
    return (float)(step->maximize ? -factor : factor);
}

/* The step of a factored parameter. The clip is that of all its matrices, so each stage goes over all of them. A stage
   waits for the one before if it reads what other threads wrote there, or writes what they may still read. */
static void step_factored(const Thread *t, const ParamStep *step, float *buffers) {
    Shared *s = t->shared;
    float *buffer = buffers, *momentum = buffers + s->widest, *weights = momentum + s->widest, *sums = weights + s->widest;
    int64_t rows = step->rows, cols = step->cols;
    double debias2 = sqrt(correction(step, step->beta2)), scale, total = 0.0;
    for (int64_t k = 0; k < step->num_matrices; k++) {
        for (int chunk = t->index; chunk < CHUNKS; chunk += s->num_threads) statistics(s, step, k, chunk, buffer, sums);
        wait_for_all(s);
        finish_columns(t, step->col + k * cols, cols, step->beta2, step->eps1, (1.0 - step->beta2) / (double)rows);
        inverse_root(t, step->row + k * rows, step->col + k * cols, rows, cols, debias2, s->a, s->b);
        wait_for_all(s);
        for (int chunk = t->index; chunk < CHUNKS; chunk += s->num_threads) {
            double squares = whitened_squares(s, step, k, chunk, buffer);
            s->totals[chunk] = k ? s->totals[chunk] + squares : squares;
        }
    }
    wait_for_all(s);
    for (int chunk = 0; chunk < CHUNKS; chunk++) total += s->totals[chunk];
    float factor = clip_factor(step, total, (double)(step->num_matrices * rows * cols));
    scale = -step->lr * (step->res_row ? sqrt(correction(step, step->beta3)) : 1.0) / correction(step, step->beta1);
    for (int64_t k = 0; k < step->num_matrices; k++) {
        if (step->num_matrices > 1) {
            if (k) wait_for_all(s);
            inverse_root(t, step->row + k * rows, step->col + k * cols, rows, cols, debias2, s->a, s->b);
            wait_for_all(s);
        }
        if (step->res_row) {
            for (int chunk = t->index; chunk < CHUNKS; chunk += s->num_threads)
                residual(s, step, k, chunk, factor, buffer, momentum, sums);
            wait_for_all(s);
            double weight = step->beta1 * step->beta1 * (1.0 - step->beta3) / (double)rows;
            finish_columns(t, step->res_col + k * cols, cols, step->beta3, step->eps2, weight);
            inverse_root(t, step->res_row + k * rows, step->res_col + k * cols, rows, cols, scale, s->res_a, s->res_b);
            wait_for_all(s);
        }
        for (int chunk = t->index; chunk < CHUNKS; chunk += s->num_threads)
            apply(s, step, k, chunk, factor, (float)scale, buffer, momentum, weights);
    }
}

/* The step of a parameter with a full second moment and no confidence, by one thread, since vectors are short. Pieces
   have sums of their own, which do not depend on other parameters. */
static void step_full(Shared *s, const ParamStep *step, float *buffers) {
    float *buffer = buffers, *weights = buffers + s->widest;
    double debias2 = correction(step, step->beta2), total = 0.0;
    float keep = (float)(1.0 - step->beta2), beta2 = (float)step->beta2, eps = (float)((1.0 - step->beta2) * step->eps1);
    for (int64_t start = 0; start < step->cols; start += PIECE) {
        int64_t count = step->cols - start < PIECE ? step->cols - start : PIECE;
        const float *restrict g = load(step->grad, step->grad_dtype, start, count, buffer);
        float *restrict v = step->moment + start, lanes[LANES] = {0.0f};
        EACH(count, {
            float x = bounded(g[j], 0x1p63f);
            v[j] = v[j] * beta2 + eps + x * x * keep;
            float u = g[j] / sqrtf(v[j]);
            lanes[l] += u * u;
        })
        total += sum_of(lanes);
    }
    float factor = (float)(clip_factor(step, total * debias2, (double)step->cols) * sqrt(debias2)), forget = (float)(1.0 - step->beta1);
    float scale = (float)(-step->lr / correction(step, step->beta1)), decay = (float)(-step->lr * step->weight_decay);
    for (int64_t start = 0; start < step->cols; start += PIECE) {
        int64_t count = step->cols - start < PIECE ? step->cols - start : PIECE;
        const float *restrict g = load(step->grad, step->grad_dtype, start, count, buffer);
        const float *restrict v = step->moment + start;
        float *restrict p = load_weight(step, start, count, weights), *restrict m = (float *)step->momentum + start;
        if (step->codec == NONE) m = memset(buffers + 2 * s->widest, 0, (size_t)count * sizeof(float));
        for (int64_t j = 0; j < count; j++) {
            m[j] += (g[j] / sqrtf(v[j]) * factor - m[j]) * forget;
            p[j] = decayed(p[j], decay) + m[j] * scale;
        }
        store_weight(step, start, count, p);
    }
}

static void *work(void *argument) {
    const Thread *thread = argument;
    Shared *s = thread->shared;
    pthread_mutex_lock(&s->gate);
    pthread_mutex_unlock(&s->gate);
    float *buffers = s->buffers + thread->index * 4 * s->widest;
    for (int64_t k = 0; k < s->num_steps; k++) {
        if (!s->steps[k].moment) step_factored(thread, s->steps + k, buffers);
        else if (thread->index == 0) step_full(s, s->steps + k, buffers);
    }
    return NULL;
}

/* Return 0, or 1 if there is no memory for the scratch; then nothing has changed. Fewer threads than given suffice. */
int came_step(const ParamStep *steps, int64_t num_steps, int num_threads) {
    Shared s = {.steps = steps, .num_steps = num_steps, .num_threads = 1};
    int64_t tallest = 1;
    s.widest = PIECE;
    for (int64_t k = 0; k < num_steps; k++) {
        if (steps[k].moment) continue;
        if (steps[k].cols > s.widest) s.widest = steps[k].cols;
        if (steps[k].rows > tallest) tallest = steps[k].rows;
    }
    s.widest = (s.widest + 16) / 16 * 16;                    /* whole cache lines */
    s.col_sums = malloc((size_t)(CHUNKS * s.widest) * sizeof(double));
    s.totals = malloc(CHUNKS * sizeof(double));
    s.buffers = malloc((size_t)(num_threads * 4 * s.widest) * sizeof(float));
    float *factors = malloc((size_t)(2 * (tallest + s.widest)) * sizeof(float));
    pthread_t *ids = malloc((size_t)num_threads * sizeof(pthread_t));
    Thread *threads = malloc((size_t)num_threads * sizeof(Thread));
    int failed = !s.col_sums || !s.totals || !s.buffers || !factors || !ids || !threads;
    if (!failed) {
        s.a = factors; s.res_a = s.a + tallest; s.b = s.res_a + tallest; s.res_b = s.b + s.widest;
        pthread_mutex_init(&s.gate, NULL);
        pthread_cond_init(&s.opened, NULL);
        pthread_mutex_lock(&s.gate);
        for (int t = 0; t < num_threads; t++) threads[t] = (Thread){&s, t};
        while (s.num_threads < num_threads && !pthread_create(&ids[s.num_threads], NULL, work, &threads[s.num_threads]))
            s.num_threads++;
        pthread_mutex_unlock(&s.gate);
        work(&threads[0]);
        for (int t = 1; t < s.num_threads; t++) pthread_join(ids[t], NULL);
        pthread_cond_destroy(&s.opened);
        pthread_mutex_destroy(&s.gate);
    }
    free(s.col_sums); free(s.totals); free(s.buffers); free(factors); free(ids); free(threads);
    return failed;
}
