/* One step of CAME on a CPU, all parameters in one call: the equations of came.py, (1) to (10), row by row.

   Each parameter is a stack of row-major matrices. A row is loaded into a buffer of floats, whatever it is kept in (fp32,
   bf16, codes of 8 or 4 bits), worked on there and stored back, so that memory is passed through once a stage: the
   gradient three times (four where the momentum is rounded), the momentum twice, the parameter once. Rows are shared out
   in chunks whose number does not depend on the number of threads, and their sums are added in the order of the chunks:
   the result is the same on any number of threads.

   Built by _native.py; every function has its plain counterpart in _update.py, _codec.py, _rounding.py and _random.py.
   Sums run in LANES partial sums, so that a compiler can vectorise them without changing any other order: p + p decay
   must not become p (1 + decay), whose factor is off by up to 6e-8 in the same direction at every step. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3, NONE = 4 };   /* how a row is kept; NONE: no momentum, beta1 = 0 */
enum { NEAREST = 0, STOCHASTIC = 1, COMPENSATED = 2 };
enum { LANES = 16, CHUNKS = 32, BLOCK8 = 128, BLOCK4 = 64, ROWS_AT_ONCE = 64, PIECE = 1024 };
enum { SHORT_BIAS = 8 * (127 - 16) };                        /* of a scale of one byte */
enum { LOOKS = 2000 };                                       /* for the other threads, some 30 microseconds */

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE()
#endif

typedef struct {                                             /* _native.py has the same */
    void *param, *grad, *momentum, *scale;
    int8_t *low;
    float *row, *col, *res_row, *res_col, *moment;           /* moment: the full second moment, where not factored */
    const float *step;
    int64_t batch, rows, cols;
    int32_t param_kind, grad_kind, momentum_kind, rounding, debias, maximize, scale_bytes;
    uint32_t ordinal;
    double lr, beta1, beta2, beta3, eps1, eps2, clip, weight_decay;
} Job;

typedef struct {
    const Job *jobs;
    int64_t num_jobs;
    int num_threads;
    pthread_mutex_t gate;                                    /* held until the number of threads is known */
    pthread_cond_t opened;                                   /* a new phase has begun */
    atomic_int arrived;                                      /* threads that wait for the others */
    atomic_uint phase;
    float *buffers;                                          /* (threads, 4, widest row) */
    double *col_sums;                                        /* (CHUNKS, widest row) */
    float *a, *b, *res_a, *res_b;                            /* factors of the matrix at hand */
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
static uint32_t seed_of(const Job *job, uint32_t stream) {
    uint32_t key = (job->ordinal * 4 + stream) * 0x9E3779B1u & 0x7FFFFFFFu;
    return mix((uint32_t)(int32_t)*job->step * 0x7FEB352Du + key);
}
static inline uint32_t random_16(uint32_t seed, uint32_t place) { return mix(place * 0x846CA68Bu + seed) >> 16; }

/* Of every NaN those of one, which stays NaN with less than 2^16 added. */
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

static uint16_t float_to_half(float x) {                     /* of a magnitude: x >= 0, or NaN */
    uint32_t u = bits_of(x);
    if (u > 0x7F800000u) return 0x7E00;
    if (u >= 0x477FF000u) return 0x7C00;
    if (u < 0x38800000u) return (uint16_t)lrintf(x * 16777216.0f);
    return (uint16_t)((u - 0x38000000u + 0xFFF + ((u >> 13) & 1)) >> 13);
}

/* The code for each element j, in lane l = j % LANES. */
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

static const float *load(const void *data, int kind, int64_t start, int64_t count, float *buffer) {
    if (kind == FP32) return (const float *)data + start;
    const uint16_t *source = (const uint16_t *)data + start;
    for (int64_t j = 0; j < count; j++) buffer[j] = float_of((uint32_t)source[j] << 16);
    return buffer;
}

static int64_t num_blocks(int kind, int64_t cols) {
    int64_t block = kind == INT8 ? BLOCK8 : BLOCK4;
    return (cols + block - 1) / block;
}

static float load_scale(const Job *job, int64_t block) {
    if (job->scale_bytes == 2) return half_to_float(((const uint16_t *)job->scale)[block]);
    uint32_t code = ((const uint8_t *)job->scale)[block];
    return code == 0 ? 0.0f : code == 255 ? NAN : float_of((code + SHORT_BIAS) << 20);
}

static void store_scale(const Job *job, int64_t block, int32_t bits) {   /* of the largest magnitude */
    if (job->scale_bytes == 2) {
        ((uint16_t *)job->scale)[block] = float_to_half(float_of((uint32_t)bits));
        return;
    }
    int32_t code = ((bits - 1) >> 20) + 1 - SHORT_BIAS;
    ((uint8_t *)job->scale)[block] = (uint8_t)(code < 1 ? 1 : code > 255 ? 255 : code);
}

/* Codes of 4 bits, by way of bytes, which compilers can vectorise. An odd row has one number more, which is not used. */
static inline void unpack(const uint8_t *restrict codes, int64_t count, float scale, float *restrict value) {
    enum { HALF = BLOCK4 / 2 };                              /* what is read back at once is what was written at once */
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

/* Values from -1 to 1 as codes of 4 bits, rounded by noise that belongs to their places. */
static inline void pack(const float *restrict value, int64_t count, uint32_t seed, uint32_t place, uint8_t *restrict codes) {
    uint8_t levels[BLOCK4];
    for (int64_t j = 0; j < count; j++) {
        float noise = (float)random_16(seed, place + (uint32_t)j) * (1.0f / 65536.0f);
        float level = floorf(value[j] * 7.0f + noise) + 8.0f;
        level = level > 15.0f ? 15.0f : level;
        levels[j] = (uint8_t)(level < 1.0f ? 1.0f : level);
    }
    if (count % 2) levels[count] = 8;
    for (int64_t j = 0; j < (count + 1) / 2; j++) codes[j] = (uint8_t)(levels[2 * j] | levels[2 * j + 1] << 4);
}

static float *load_momentum(const Job *job, int64_t index, float *buffer) {
    int64_t cols = job->cols;
    if (job->momentum_kind == FP32) return (float *)job->momentum + index * cols;
    if (job->momentum_kind == NONE) return memset(buffer, 0, (size_t)cols * sizeof(float));
    if (job->momentum_kind == BF16) return (float *)load(job->momentum, BF16, index * cols, cols, buffer);
    int64_t blocks = num_blocks(job->momentum_kind, cols);
    if (job->momentum_kind == INT8) {
        const int8_t *codes = (const int8_t *)job->momentum + index * cols;
        for (int64_t k = 0; k < blocks; k++) {
            float scale = load_scale(job, index * blocks + k);
            int64_t end = (k + 1) * BLOCK8 < cols ? (k + 1) * BLOCK8 : cols;
            for (int64_t j = k * BLOCK8; j < end; j++) {
                float y = (float)codes[j] * (1.0f / 127.0f);
                buffer[j] = y / (2.0f - fabsf(y)) * scale;
            }
        }
    } else {
        const uint8_t *codes = (const uint8_t *)job->momentum + index * ((cols + 1) / 2);
        for (int64_t k = 0; k < blocks; k++) {
            float scale = load_scale(job, index * blocks + k);
            int64_t end = (k + 1) * BLOCK4 < cols ? (k + 1) * BLOCK4 : cols;
            int64_t count = end - k * BLOCK4;
            if (count == BLOCK4) unpack(codes + k * (BLOCK4 / 2), BLOCK4, scale, buffer + k * BLOCK4);
            else unpack(codes + k * (BLOCK4 / 2), count, scale, buffer + k * BLOCK4);
        }
    }
    return buffer;
}

static void store_momentum(const Job *job, int64_t index, float *value) {
    int64_t cols = job->cols;
    if (job->momentum_kind == FP32 || job->momentum_kind == NONE) return;
    if (job->momentum_kind == BF16) {
        uint16_t *target = (uint16_t *)job->momentum + index * cols;
        for (int64_t j = 0; j < cols; j++) target[j] = bf16_of(value[j]);
        return;
    }
    int64_t block = job->momentum_kind == INT8 ? BLOCK8 : BLOCK4, blocks = num_blocks(job->momentum_kind, cols);
    for (int64_t k = 0; k < blocks; k++) {
        int64_t begin = k * block, end = begin + block < cols ? begin + block : cols;
        int32_t largest = 0;                                 /* bits of magnitudes are in their order, NaN above all */
        for (int64_t j = begin; j < end; j++) {
            int32_t x = (int32_t)(bits_of(value[j]) & 0x7FFFFFFFu);
            largest = x > largest ? x : largest;
        }
        store_scale(job, index * blocks + k, largest);
        float scale = load_scale(job, index * blocks + k);
        scale = scale < 5.9604644775390625e-8f ? 5.9604644775390625e-8f : scale;
        for (int64_t j = begin; j < end; j++) {
            float x = value[j] / scale;
            x = x > 1.0f ? 1.0f : x;
            value[j] = x < -1.0f ? -1.0f : x;
        }
    }
    if (job->momentum_kind == INT8) {
        int8_t *codes = (int8_t *)job->momentum + index * cols;
        for (int64_t j = 0; j < cols; j++) codes[j] = (int8_t)rintf(value[j] / (1.0f + fabsf(value[j])) * 254.0f);
        return;
    }
    uint8_t *codes = (uint8_t *)job->momentum + index * ((cols + 1) / 2);
    uint32_t place = (uint32_t)(index * cols), seed = seed_of(job, 0);
    for (int64_t k = 0; k < blocks; k++) {
        int64_t begin = k * BLOCK4;
        if (begin + BLOCK4 <= cols) pack(value + begin, BLOCK4, seed, place + (uint32_t)begin, codes + begin / 2);
        else pack(value + begin, cols - begin, seed, place + (uint32_t)begin, codes + begin / 2);
    }
}

static float *load_weight(const Job *job, int64_t start, int64_t count, float *buffer) {
    if (job->rounding != COMPENSATED || job->param_kind == FP32)
        return (float *)load(job->param, job->param_kind, start, count, buffer);
    const uint16_t *high = (const uint16_t *)job->param + start;
    const int8_t *low = job->low + start;
    for (int64_t j = 0; j < count; j++) buffer[j] = float_of(((uint32_t)high[j] << 16) + ((uint32_t)(int32_t)low[j] << 8));
    return buffer;
}

static void store_weight(const Job *job, int64_t start, int64_t count, const float *value) {
    if (job->param_kind == FP32) return;
    uint16_t *target = (uint16_t *)job->param + start;
    if (job->rounding == STOCHASTIC) {
        uint32_t seed = seed_of(job, 1);
        for (int64_t j = 0; j < count; j++)
            target[j] = (uint16_t)((bits_to_round(value[j]) + random_16(seed, (uint32_t)(start + j))) >> 16);
    } else if (job->rounding == COMPENSATED) {
        int8_t *low = job->low + start;
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

static double correction(const Job *job, double beta) {
    return job->debias ? (beta == 0.0 ? 1.0 : -expm1((double)*job->step * log(beta))) : 1.0;
}

/* The two factors of (row col / mean(row))^(-1/2), times `scale`: this thread's part of them. */
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

/* The largest magnitude of a gradient whose square, added up so many times, does not overflow. */
static float bound_of(int64_t rows, int64_t cols) { return (float)(0x1p63 / sqrt((double)(rows > cols ? rows : cols))); }

/* NaN stays NaN. The gradient is bounded and not its square, which is added up with one rounding. */
static inline float bounded(float g, float bound) { return fabsf(g) > bound ? bound : g; }

/* avg <- beta avg + (1 - beta) (mean + eps), for this thread's columns of a matrix from the sums of its chunks. */
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

/* Sums of the squares of some rows of a matrix, of each row and of each column. To bound each number takes longer. */
static inline __attribute__((always_inline)) void add_squares(const Job *job, int64_t index, int64_t count, int is_bounded,
                                                              float bound, float *buffer, float *restrict sums,
                                                              double *row_sums) {
    int64_t cols = job->cols;
    memset(sums, 0, (size_t)cols * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        const float *restrict g = load(job->grad, job->grad_kind, (index + i) * cols, cols, buffer);
        float lanes[LANES] = {0.0f};
        if (is_bounded) EACH(cols, { float x = bounded(g[j], bound), q = x * x; sums[j] += q; lanes[l] += q; })
        else EACH(cols, { float q = g[j] * g[j]; sums[j] += q; lanes[l] += q; })
        row_sums[i] = sum_of(lanes);
    }
}

static void statistics(Shared *s, const Job *job, int64_t matrix, int chunk, float *buffer, float *sums) {
    int64_t begin, end, cols = job->cols;
    part_of(job->rows, chunk, CHUNKS, &begin, &end);
    float bound = bound_of(job->rows, cols);
    double *total = s->col_sums + chunk * s->widest, row_sums[ROWS_AT_ONCE];
    memset(total, 0, (size_t)cols * sizeof(double));
    for (int64_t first = begin; first < end; first += ROWS_AT_ONCE) {
        int64_t index = matrix * job->rows + first, count = end - first < ROWS_AT_ONCE ? end - first : ROWS_AT_ONCE;
        int is_large = 0;
        add_squares(job, index, count, 0, bound, buffer, sums, row_sums);
        for (int64_t i = 0; i < count; i++) is_large |= !(row_sums[i] < (double)bound * bound);
        if (is_large) add_squares(job, index, count, 1, bound, buffer, sums, row_sums);
        for (int64_t i = 0; i < count; i++) {
            double mean = row_sums[i] / (double)cols;
            job->row[index + i] = (float)(job->beta2 * job->row[index + i] + (1.0 - job->beta2) * (job->eps1 + mean));
        }
        for (int64_t j = 0; j < cols; j++) total[j] += sums[j];
    }
}

static double whitened_squares(const Shared *s, const Job *job, int64_t matrix, int chunk, float *buffer) {
    int64_t begin, end, cols = job->cols;
    part_of(job->rows, chunk, CHUNKS, &begin, &end);
    double total = 0.0;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict g = load(job->grad, job->grad_kind, (matrix * job->rows + i) * cols, cols, buffer);
        const float *restrict b = s->b;
        float a = s->a[i], lanes[LANES] = {0.0f};
        EACH(cols, { float u = g[j] * a * b[j]; lanes[l] += u * u; })
        total += sum_of(lanes);
    }
    return total;
}

/* `factor`: of the clip, with the sign of the gradient. */
static void residual(Shared *s, const Job *job, int64_t matrix, int chunk, float factor, float *buffer, float *momentum,
                     float *sums) {
    int64_t begin, end, cols = job->cols;
    part_of(job->rows, chunk, CHUNKS, &begin, &end);
    double *total = s->col_sums + chunk * s->widest;
    double weight = job->beta1 * job->beta1 * (1.0 - job->beta3) / (double)cols;
    float keep = (float)(1.0 - job->beta1);
    memset(total, 0, (size_t)cols * sizeof(double));
    for (int64_t first = begin; first < end; first += ROWS_AT_ONCE) {
        memset(sums, 0, (size_t)cols * sizeof(float));
        for (int64_t i = first; i < end && i < first + ROWS_AT_ONCE; i++) {
            int64_t index = matrix * job->rows + i;
            const float *restrict g = load(job->grad, job->grad_kind, index * cols, cols, buffer);
            const float *restrict b = s->b;
            float *restrict m = load_momentum(job, index, momentum);
            float *restrict c = sums, a = s->a[i] * factor, lanes[LANES] = {0.0f};
            EACH(cols, {
                float d = g[j] * a * b[j] - m[j], q = d * d;
                m[j] += d * keep;
                c[j] += q;
                lanes[l] += q;
            })
            double kept = job->beta3 * job->res_row[index] + (1.0 - job->beta3) * job->eps2;
            job->res_row[index] = (float)(kept + weight * sum_of(lanes));
        }
        for (int64_t j = 0; j < cols; j++) total[j] += sums[j];
    }
}

/* Without decay as it is: an infinite weight times 0 would be NaN. */
static inline float decayed(float p, float decay) { return decay != 0.0f ? p + p * decay : p; }

/* Without confidence there was no residual() to take the gradient into a momentum in fp32, and `scale` is all there is. */
static void apply(Shared *s, const Job *job, int64_t matrix, int chunk, float factor, float scale, float *buffer,
                  float *momentum, float *weights) {
    int64_t begin, end, cols = job->cols;
    part_of(job->rows, chunk, CHUNKS, &begin, &end);
    float keep = (float)(1.0 - job->beta1), decay = (float)(-job->lr * job->weight_decay);
    for (int64_t i = begin; i < end; i++) {
        int64_t index = matrix * job->rows + i;
        float *restrict m = load_momentum(job, index, momentum);
        const float *restrict b = s->b;
        const float *restrict res_b = s->res_b;
        if (job->momentum_kind != FP32 || !job->res_row) {
            const float *restrict g = load(job->grad, job->grad_kind, index * cols, cols, buffer);
            float a = s->a[i] * factor;
            for (int64_t j = 0; j < cols; j++) m[j] += (g[j] * a * b[j] - m[j]) * keep;
        }
        float *restrict p = load_weight(job, index * cols, cols, weights);
        if (job->res_row) {
            float a = s->res_a[i];
            for (int64_t j = 0; j < cols; j++) p[j] = decayed(p[j], decay) + m[j] * a * res_b[j];
        } else {
            for (int64_t j = 0; j < cols; j++) p[j] = decayed(p[j], decay) + m[j] * scale;
        }
        store_weight(job, index * cols, cols, p);
        store_momentum(job, index, m);
    }
}

/* Stages take some ten microseconds, a thread that sleeps as long to wake: so it looks for a while before it sleeps. */
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
    for (int k = 0; k < LOOKS; k++) {
        if (atomic_load(&s->phase) != phase) return;
        PAUSE();
    }
    pthread_mutex_lock(&s->gate);
    while (atomic_load(&s->phase) == phase) pthread_cond_wait(&s->opened, &s->gate);
    pthread_mutex_unlock(&s->gate);
}

static float clip_factor(const Job *job, double total, double count) {
    double rms = sqrt(total / (count * job->clip * job->clip));
    double factor = rms > 1.0 ? 1.0 / rms : (rms == rms ? 1.0 : rms);
    return (float)(job->maximize ? -factor : factor);
}

/* A parameter with several matrices is clipped as a whole, so that each stage goes over all of them. A stage waits for
   the one before where it reads what other threads wrote there, or writes what they may still read. */
static void step_factored(const Thread *t, const Job *job, float *buffers) {
    Shared *s = t->shared;
    float *buffer = buffers, *momentum = buffers + s->widest, *weights = momentum + s->widest, *sums = weights + s->widest;
    int64_t rows = job->rows, cols = job->cols;
    double debias2 = sqrt(correction(job, job->beta2)), scale, total = 0.0;
    for (int64_t k = 0; k < job->batch; k++) {
        for (int chunk = t->index; chunk < CHUNKS; chunk += s->num_threads) statistics(s, job, k, chunk, buffer, sums);
        wait_for_all(s);
        finish_columns(t, job->col + k * cols, cols, job->beta2, job->eps1, (1.0 - job->beta2) / (double)rows);
        inverse_root(t, job->row + k * rows, job->col + k * cols, rows, cols, debias2, s->a, s->b);
        wait_for_all(s);
        for (int chunk = t->index; chunk < CHUNKS; chunk += s->num_threads) {
            double squares = whitened_squares(s, job, k, chunk, buffer);
            s->totals[chunk] = k ? s->totals[chunk] + squares : squares;
        }
    }
    wait_for_all(s);
    for (int chunk = 0; chunk < CHUNKS; chunk++) total += s->totals[chunk];
    float factor = clip_factor(job, total, (double)(job->batch * rows * cols));
    scale = -job->lr * (job->res_row ? sqrt(correction(job, job->beta3)) : 1.0) / correction(job, job->beta1);
    for (int64_t k = 0; k < job->batch; k++) {
        if (job->batch > 1) {
            if (k) wait_for_all(s);
            inverse_root(t, job->row + k * rows, job->col + k * cols, rows, cols, debias2, s->a, s->b);
            wait_for_all(s);
        }
        if (job->res_row) {
            for (int chunk = t->index; chunk < CHUNKS; chunk += s->num_threads)
                residual(s, job, k, chunk, factor, buffer, momentum, sums);
            wait_for_all(s);
            double weight = job->beta1 * job->beta1 * (1.0 - job->beta3) / (double)rows;
            finish_columns(t, job->res_col + k * cols, cols, job->beta3, job->eps2, weight);
            inverse_root(t, job->res_row + k * rows, job->res_col + k * cols, rows, cols, scale, s->res_a, s->res_b);
            wait_for_all(s);
        }
        for (int chunk = t->index; chunk < CHUNKS; chunk += s->num_threads)
            apply(s, job, k, chunk, factor, (float)scale, buffer, momentum, weights);
    }
}

/* A full second moment and no confidence, in pieces whose sums no other parameter changes; one thread does it, since
   vectors are short. */
static void step_full(Shared *s, const Job *job, float *buffers) {
    float *buffer = buffers, *weights = buffers + s->widest;
    double debias2 = correction(job, job->beta2), total = 0.0;
    float keep = (float)(1.0 - job->beta2), beta2 = (float)job->beta2, eps = (float)((1.0 - job->beta2) * job->eps1);
    for (int64_t start = 0; start < job->cols; start += PIECE) {
        int64_t count = job->cols - start < PIECE ? job->cols - start : PIECE;
        const float *restrict g = load(job->grad, job->grad_kind, start, count, buffer);
        float *restrict v = job->moment + start, lanes[LANES] = {0.0f};
        EACH(count, {
            float x = bounded(g[j], 0x1p63f);
            v[j] = v[j] * beta2 + eps + x * x * keep;
            float u = g[j] / sqrtf(v[j]);
            lanes[l] += u * u;
        })
        total += sum_of(lanes);
    }
    float factor = (float)(clip_factor(job, total * debias2, (double)job->cols) * sqrt(debias2)), forget = (float)(1.0 - job->beta1);
    float scale = (float)(-job->lr / correction(job, job->beta1)), decay = (float)(-job->lr * job->weight_decay);
    for (int64_t start = 0; start < job->cols; start += PIECE) {
        int64_t count = job->cols - start < PIECE ? job->cols - start : PIECE;
        const float *restrict g = load(job->grad, job->grad_kind, start, count, buffer);
        const float *restrict v = job->moment + start;
        float *restrict p = load_weight(job, start, count, weights), *restrict m = (float *)job->momentum + start;
        if (job->momentum_kind == NONE) m = memset(buffers + 2 * s->widest, 0, (size_t)count * sizeof(float));
        for (int64_t j = 0; j < count; j++) {
            m[j] += (g[j] / sqrtf(v[j]) * factor - m[j]) * forget;
            p[j] = decayed(p[j], decay) + m[j] * scale;
        }
        store_weight(job, start, count, p);
    }
}

static void *work(void *argument) {
    const Thread *thread = argument;
    Shared *s = thread->shared;
    pthread_mutex_lock(&s->gate);
    pthread_mutex_unlock(&s->gate);
    float *buffers = s->buffers + thread->index * 4 * s->widest;
    for (int64_t k = 0; k < s->num_jobs; k++) {
        if (!s->jobs[k].moment) step_factored(thread, s->jobs + k, buffers);
        else if (thread->index == 0) step_full(s, s->jobs + k, buffers);
    }
    return NULL;
}

/* Returns 0, or 1 where memory ran out before anything was changed. Fewer threads than asked for do as well. */
int came_step(const Job *jobs, int64_t num_jobs, int num_threads) {
    Shared s = {.jobs = jobs, .num_jobs = num_jobs, .num_threads = 1};
    int64_t tallest = 1;
    s.widest = PIECE;
    for (int64_t k = 0; k < num_jobs; k++) {
        if (jobs[k].moment) continue;
        if (jobs[k].cols > s.widest) s.widest = jobs[k].cols;
        if (jobs[k].rows > tallest) tallest = jobs[k].rows;
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
