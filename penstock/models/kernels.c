/* What a decode step of the embedded engine does: norms, gates, attention of one new token per slot, the sums of sampling;
 * and its matrix products in bfloat16, where the processor has instructions for them. torch needs some thirty small
 * operations a layer for the first three, and its threads meet after each of them; here they are four, and attention
 * reads the cache once, of each answer as far as that is long.
 *
 * Plain C that a compiler turns into vectors, from a file of its own for each kind of processor, which gives it a NAME. `kernels.py` calls it and says what the pointers must be; nothing is checked
 * here. bfloat16 is the upper half of a float.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

#ifdef __AVX512F__
enum { LANES = 16 };  /* floats in a vector */
#else
enum { LANES = 8 };
#endif
enum { TOGETHER = 4 };  /* queries that share what is loaded of a key or value */
enum { ROWS = 8, VECTORS = 3, PANEL = 16 * VECTORS };  /* of a product: what is kept in registers */
enum { NEAR = 512 };    /* rows that all panels are multiplied with before the next ones are: they stay in the caches */
enum { BLOCK = 128 };   /* logits that are summed together, as in sampling.py */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half __attribute__((vector_size(2 * LANES)));

/* One instruction, which compilers do not find by themselves. */
INLINE uvec widened(const uint16_t *bits) {
#ifdef __AVX512F__
    return (uvec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)bits));
#else
    return (uvec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)bits));
#endif
}

INLINE vec load(const void *from, int64_t at, int bf16) {
    if (bf16) {
        return (vec)(widened((const uint16_t *)from + at) << 16);
    }
    vec found;
    memcpy(&found, (const float *)from + at, sizeof found);
    return found;
}

/* To the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE half rounded(vec x) {
    uvec bits = (uvec)x;
    uvec nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec nan = (uvec)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((nearest & ~nan) | (nan & 0x7fc0), half);
}

INLINE void store(void *to, int64_t at, vec x, int bf16) {
    if (bf16) {
        half bits = rounded(x);
        memcpy((uint16_t *)to + at, &bits, sizeof bits);
    } else {
        memcpy((float *)to + at, &x, sizeof x);
    }
}

INLINE vec all(float x) { return x - (vec){0}; }

INLINE vec pick(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

INLINE float sum(vec x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

INLINE float largest(vec x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* e^x to within 2 units in the last place; 0 below -87.3, NaN of NaN. x must not be above 88. */
INLINE vec exponential(vec given) {
    vec x = pick(given < -87.33f, all(-87.33f), given);
    vec shifted = x * 1.44269504f + 12582912.0f;  /* rounds to a whole number, in the lowest bits */
    vec whole = shifted - 12582912.0f;
    vec rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    return pick(given < -87.33f, all(0), p * (vec)(((ivec)shifted + 127) << 23));
}

INLINE float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

/* Rows begin .. end of hidden / root(mean of squares) * weight, after `more`, if there is any, was added to hidden. */
static void norm_rows(float *hidden, const void *more, int more_bf16, const float *weight, float eps, void *out, int bf16,
                      int64_t width, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        float *x = hidden + row * width;
        vec squares[2] = {{0}, {0}};
        for (int64_t i = 0; i < width; i += LANES) {
            vec part = load(x, i, 0);
            if (more) {
                part += load(more, row * width + i, more_bf16);
                store(x, i, part, 0);
            }
            squares[i / LANES % 2] += part * part;
        }
        float scale = inverse_root(sum(squares[0] + squares[1]) / (float)width + eps);
        for (int64_t i = 0; i < width; i += LANES)
            store(out, row * width + i, load(x, i, 0) * scale * load(weight, i, 0), bf16);
    }
}

/* Rows begin .. end of silu(gate) * up, which lie side by side. */
static void gated_rows(const void *gate_up, int from_bf16, void *out, int bf16, int64_t width, int64_t begin,
                       int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        int64_t at = 2 * row * width;
        for (int64_t i = 0; i < width; i += LANES) {
            vec gate = load(gate_up, at + i, from_bf16), up = load(gate_up, at + width + i, from_bf16);
            vec away = pick(-gate > 87.0f, all(87.0f), -gate);
            store(out, row * width + i, gate / (1.0f + exponential(away)) * up, bf16);
        }
    }
}

/* A vector of logits; what lies behind the end of the row is -inf. */
INLINE vec logits_at(const void *row, int64_t at, int64_t width, int bf16) {
    if (at + LANES <= width) return load(row, at, bf16);
    float rest[LANES];
    for (int i = 0; i < LANES; i++) {
        uint32_t bits = 0xff800000u;
        if (at + i < width && bf16) bits = (uint32_t)((const uint16_t *)row)[at + i] << 16;
        else if (at + i < width) memcpy(&bits, (const float *)row + at + i, sizeof bits);
        memcpy(rest + i, &bits, sizeof bits);
    }
    return load(rest, 0, 0);
}

/* Of rows begin .. end: the largest logit, and of each block of BLOCK the sum of e^(logit - the largest of the row). Each
 * logit is read once: a block is summed relative to its own largest first. `tops` has room for one number a block. */
INLINE void sum_blocks(const char *logits, int bf16, float *sums, float *largests, float *tops, int64_t width,
                       int64_t begin, int64_t end) {
    int64_t blocks = (width + BLOCK - 1) / BLOCK;
    for (int64_t row = begin; row < end; row++) {
        const char *x = logits + row * width * (bf16 ? 2 : 4);
        float *of_row = sums + row * blocks, most = -__builtin_inff();
        for (int64_t b = 0; b < blocks; b++) {
            vec parts[BLOCK / LANES], tallest = all(-__builtin_inff()), total = {0};
            for (int i = 0; i < BLOCK / LANES; i++) {
                parts[i] = logits_at(x, b * BLOCK + i * LANES, width, bf16);
                tallest = pick(parts[i] > tallest, parts[i], tallest);
            }
            float top = largest(tallest), from = top == -__builtin_inff() ? 0 : top;
            for (int i = 0; i < BLOCK / LANES; i++) total += exponential(parts[i] - from);
            of_row[b] = sum(total), tops[b] = top;
            most = top > most ? top : most;
        }
        largests[row] = most;
        for (int64_t b = 0; b < blocks; b += LANES) {
            vec factors = exponential(logits_at(tops, b, blocks, 0) - most);
            for (int i = 0; i < LANES && b + i < blocks; i++) of_row[b + i] *= factors[i];
        }
    }
}

struct attention {
    const void *qkv;              /* n x (heads + 2 kv_heads) x d */
    void *keys, *values, *out;    /* slots x kv_heads x d x length; slots x kv_heads x length x d; n x heads x d */
    const float *cos, *sin;       /* positions x d; sin carries the sign of the rotation */
    const float *norms;           /* of queries, of keys: 2 x d, or none */
    const int64_t *positions;     /* n: of the new token; what lies behind it is not read */
    float eps, scale;
    int qkv_bf16, bf16;           /* the dtype of qkv; of the cache and of what comes out */
    int64_t n, heads, kv_heads, d, length;
};

/* One head of a new token, normed and turned to its position. */
INLINE void rotate(const struct attention *a, int64_t from, const float *norm, int64_t position, float scale, float *to) {
    int64_t d = a->d, turn = d / 2;
    const float *cos = a->cos + position * d, *sin = a->sin + position * d;
    if (norm) {
        vec squares = {0};
        for (int64_t i = 0; i < d; i += LANES) {
            vec part = load(a->qkv, from + i, a->qkv_bf16);
            squares += part * part;
        }
        float by = inverse_root(sum(squares) / (float)d + a->eps);
        for (int64_t i = 0; i < d; i += LANES)
            store(to, i, load(a->qkv, from + i, a->qkv_bf16) * by * load(norm, i, 0), 0);
    } else {
        for (int64_t i = 0; i < d; i += LANES) store(to, i, load(a->qkv, from + i, a->qkv_bf16), 0);
    }
    for (int64_t i = 0; i < turn; i += LANES) {
        vec low = load(to, i, 0), high = load(to, turn + i, 0);
        store(to, i, (low * load(cos, i, 0) + high * load(sin, i, 0)) * scale, 0);
        store(to, turn + i, (high * load(cos, turn + i, 0) + low * load(sin, turn + i, 0)) * scale, 0);
    }
}

/* Ask for what will be read soon; the processor does not foresee such short rows. Asking for too much does no harm. */
INLINE void fetch(const void *from, int64_t at, int bf16) {
    __builtin_prefetch((const char *)from + at * (bf16 ? 2 : 4), 0, 2);
    if (!bf16) __builtin_prefetch((const char *)from + at * 4 + 64, 0, 2);
}

/* `count` queries over the first `tokens` keys, a vector of tokens at a time, two of them at once. */
INLINE void score(const float *queries, const void *keys, float *scores, int64_t tokens, int64_t length, int64_t d,
                  int64_t room, int bf16, int count) {
    for (int64_t t = 0; t < tokens; t += 2 * LANES) {
        vec totals[2][TOGETHER] = {{{0}}};
        for (int64_t i = 0; i < d; i++) {
            vec near = load(keys, i * length + t, bf16), far = load(keys, i * length + t + LANES, bf16);
            fetch(keys, (i + d) * length + t, bf16);  /* of the head after this one */
            for (int q = 0; q < count; q++) {
                totals[0][q] += queries[q * d + i] * near;
                totals[1][q] += queries[q * d + i] * far;
            }
        }
        for (int q = 0; q < count; q++) {
            store(scores, q * room + t, totals[0][q], 0);
            store(scores, q * room + t + LANES, totals[1][q], 0);
        }
    }
}

/* Scores become weights: e^(score - the largest). Their sum. */
INLINE float weigh(float *scores, int64_t tokens, int64_t room) {
    for (int64_t t = tokens; t < room; t++) scores[t] = -__builtin_inff();
    vec tops = load(scores, 0, 0);
    for (int64_t t = LANES; t < room; t += LANES) {
        vec next = load(scores, t, 0);
        tops = pick(next > tops, next, tops);
    }
    float top = largest(tops);
    vec totals = {0};
    for (int64_t t = 0; t < room; t += LANES) {
        vec weights = exponential(load(scores, t, 0) - top);
        store(scores, t, weights, 0);
        totals += weights;
    }
    return sum(totals);
}

/* The weighted mean of the values, two vectors of each at a time. */
INLINE void mix(const float *weights, const float *sums, const void *values, void *out, int64_t at, int64_t tokens,
                int64_t length, int64_t d, int64_t room, int bf16, int count) {
    for (int64_t i = 0; i < d; i += 2 * LANES) {
        vec totals[2][TOGETHER] = {{{0}}};
        for (int64_t t = 0; t < tokens; t++) {
            vec near = load(values, t * d + i, bf16), far = load(values, t * d + i + LANES, bf16);
            fetch(values, (t + length) * d + i, bf16);
            for (int q = 0; q < count; q++) {
                totals[0][q] += weights[q * room + t] * near;
                totals[1][q] += weights[q * room + t] * far;
            }
        }
        for (int q = 0; q < count; q++) {
            store(out, at + q * d + i, totals[0][q] / sums[q], bf16);
            store(out, at + q * d + i + LANES, totals[1][q] / sums[q], bf16);
        }
    }
}

INLINE void attend_queries(const struct attention *a, const float *queries, const void *keys, const void *values,
                           int64_t at, int64_t tokens, int64_t room, float *scores, int bf16, int count) {
    float sums[TOGETHER];
    score(queries, keys, scores, tokens, a->length, a->d, room, bf16, count);
    for (int q = 0; q < count; q++) sums[q] = weigh(scores + q * room, tokens, room);
    mix(scores, sums, values, a->out, at, tokens, a->length, a->d, room, bf16, count);
}

/* Key-value heads begin .. end of all slots: what is new goes into the cache, then its queries read it. `scratch` has
 * room for TOGETHER queries and their scores. */
INLINE void attend_heads(const struct attention *a, int64_t begin, int64_t end, float *scratch, int bf16) {
    int64_t d = a->d, group = a->heads / a->kv_heads, all_heads = a->heads + 2 * a->kv_heads;
    size_t item = bf16 ? 2 : 4;
    float *queries = scratch, *scores = scratch + TOGETHER * d;
    for (int64_t each = begin; each < end; each++) {
        int64_t slot = each / a->kv_heads, head = each % a->kv_heads, position = a->positions[slot];
        int64_t tokens = position + 1, room = (tokens + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        int64_t row = slot * all_heads * d;
        char *keys = (char *)a->keys + item * (size_t)(each * d * a->length);
        char *values = (char *)a->values + item * (size_t)(each * d * a->length);

        rotate(a, row + (a->heads + head) * d, a->norms ? a->norms + d : 0, position, 1.0f, queries);
        for (int64_t i = 0; i < d; i += LANES) {
            vec key = load(queries, i, 0);
            half bits = rounded(key);
            for (int lane = 0; lane < LANES; lane++) {
                int64_t at = (i + lane) * a->length + position;
                if (bf16) ((uint16_t *)keys)[at] = bits[lane];
                else ((float *)keys)[at] = key[lane];
            }
            store(values, position * d + i, load(a->qkv, row + (a->heads + a->kv_heads + head) * d + i, a->qkv_bf16),
                  bf16);
        }
        for (int64_t first = 0; first < group; first += TOGETHER) {
            int64_t count = group - first < TOGETHER ? group - first : TOGETHER, query = head * group + first;
            for (int64_t q = 0; q < count; q++)
                rotate(a, row + (query + q) * d, a->norms, position, a->scale, queries + q * d);
            int64_t at = (slot * a->heads + query) * d;
            switch (count) {
            case 1: attend_queries(a, queries, keys, values, at, tokens, room, scores, bf16, 1); break;
            case 2: attend_queries(a, queries, keys, values, at, tokens, room, scores, bf16, 2); break;
            case 3: attend_queries(a, queries, keys, values, at, tokens, room, scores, bf16, 3); break;
            default: attend_queries(a, queries, keys, values, at, tokens, room, scores, bf16, TOGETHER);
            }
        }
    }
}

#if defined(__AVX512F__) && (__GNUC__ >= 10 || __clang_major__ >= 9)
#define MULTIPLIES 1
#define WITH_BF16 __attribute__((target("avx512bf16")))

/* `count` rows of x times a panel of PANEL columns, in which pairs of numbers lie side by side for each column. A row's
 * sums are made in one order, whatever rows are beside it. While they are, some of what is multiplied next is fetched. */
INLINE WITH_BF16 void tile(const uint16_t *x, const uint16_t *panel, float *out, int64_t pairs, int64_t width,
                           int64_t columns, const char *next, int64_t step, int count) {
    __m512 sums[ROWS][VECTORS];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = (__m512bh)_mm512_loadu_si512(panel + (k * VECTORS + v) * 32);
        __builtin_prefetch(next + k * step, 0, 2);
        for (int r = 0; r < count; r++) {
            int32_t pair;
            memcpy(&pair, x + 2 * (r * pairs + k), sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], both, weights[v]);
        }
    }
    for (int r = 0; r < count; r++) {
        for (int v = 0; v < VECTORS && 16 * v < columns; v++) {
            int64_t left = columns - 16 * v;
            _mm512_mask_storeu_ps(out + r * width + 16 * v, left < 16 ? (__mmask16)((1u << left) - 1) : 0xffff, sums[r][v]);
        }
    }
}

/* Panels begin .. end of a product, for all rows of x (rows x 2 * pairs): of out, rows x width. */
WITH_BF16 static void multiply(const uint16_t *x, const uint16_t *panels, float *out, int64_t rows, int64_t pairs,
                               int64_t width, int64_t begin, int64_t end) {
    int64_t size = pairs * VECTORS * 32, blocks = (rows + ROWS - 1) / ROWS, step = 64 * VECTORS / blocks;
    for (int64_t each = begin; each < end; each++) {
        const uint16_t *panel = panels + each * size;
        const char *next = (const char *)(panel + size);
        int64_t columns = width - each * PANEL;
        for (int64_t row = 0; row < rows; row += ROWS, next += pairs * step) {
            const uint16_t *from = x + 2 * row * pairs;
            float *to = out + row * width + each * PANEL;
            switch (rows - row) {
            case 1: tile(from, panel, to, pairs, width, columns, next, step, 1); break;
            case 2: tile(from, panel, to, pairs, width, columns, next, step, 2); break;
            case 3: tile(from, panel, to, pairs, width, columns, next, step, 3); break;
            case 4: tile(from, panel, to, pairs, width, columns, next, step, 4); break;
            case 5: tile(from, panel, to, pairs, width, columns, next, step, 5); break;
            case 6: tile(from, panel, to, pairs, width, columns, next, step, 6); break;
            case 7: tile(from, panel, to, pairs, width, columns, next, step, 7); break;
            default: tile(from, panel, to, pairs, width, columns, next, step, ROWS);
            }
        }
    }
}
#else
#define MULTIPLIES 0
static void multiply(const uint16_t *x, const uint16_t *panels, float *out, int64_t rows, int64_t pairs, int64_t width,
                     int64_t begin, int64_t end) {}
#endif

/* Which of `count` pieces of work this thread does. */
static void share(int64_t count, int64_t *begin, int64_t *end) {
    int64_t threads = 1, mine = 0;
#ifdef _OPENMP
    threads = omp_get_num_threads(), mine = omp_get_thread_num();
#endif
    *begin = count * mine / threads, *end = count * (mine + 1) / threads;
}

/* What `kernels.py` expects to find; larger with every change of what is called, with what, and of what comes out. */
EXPORT int penstock_version(void) { return 3; }

EXPORT void penstock_norm(float *hidden, const void *more, int more_bf16, const float *weight, float eps, void *out,
                          int bf16, int64_t rows, int64_t width, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t begin, end;
        share(rows, &begin, &end);
        norm_rows(hidden, more, more_bf16, weight, eps, out, bf16, width, begin, end);
    }
}

/* Whether `penstock_multiply` was compiled; the processor must have its instructions too. */
EXPORT int penstock_multiplies(void) { return MULTIPLIES; }

EXPORT void penstock_multiply(const void *x, const void *panels, float *out, int64_t rows, int64_t pairs, int64_t width,
                              int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t begin, end;
        share((width + PANEL - 1) / PANEL, &begin, &end);
        for (int64_t row = 0; row < rows; row += NEAR)
            multiply((const uint16_t *)x + 2 * row * pairs, panels, out + row * width, rows - row < NEAR ? rows - row : NEAR,
                     pairs, width, begin, end);
    }
}

EXPORT void penstock_gated(const void *gate_up, int from_bf16, void *out, int bf16, int64_t rows, int64_t width, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t begin, end;
        share(rows, &begin, &end);
        gated_rows(gate_up, from_bf16, out, bf16, width, begin, end);
    }
}

/* 0, or 1 when there is no memory: then some of the rows were not written. */
EXPORT int penstock_sum_blocks(const void *logits, int bf16, float *sums, float *largests, int64_t rows, int64_t width,
                               int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        int64_t begin, end;
        share(rows, &begin, &end);
        float *tops = malloc(sizeof(float) * (size_t)((width + BLOCK - 1) / BLOCK));
        if (tops && bf16) sum_blocks(logits, 1, sums, largests, tops, width, begin, end);
        else if (tops) sum_blocks(logits, 0, sums, largests, tops, width, begin, end);
        if (!tops) {
#pragma omp atomic write
            failed = 1;
        }
        free(tops);
    }
    return failed;
}

/* The same. */
EXPORT int penstock_attend(const struct attention *a, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        int64_t begin, end;
        share(a->n * a->kv_heads, &begin, &end);
        float *scratch = aligned_alloc(64, sizeof(float) * TOGETHER * (size_t)(a->d + a->length));
        if (scratch && a->bf16) attend_heads(a, begin, end, scratch, 1);
        else if (scratch) attend_heads(a, begin, end, scratch, 0);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
        free(scratch);
    }
    return failed;
}

/* A module without anything in it: the library lies where Python finds it, and is called through ctypes. */
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define INIT_OF(name) PyInit_##name
#define INIT(name) INIT_OF(name)

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = TEXT(NAME)};

PyMODINIT_FUNC INIT(NAME)(void) { return PyModuleDef_Init(&module); }
