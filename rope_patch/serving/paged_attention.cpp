// Attention over a paged cache, in one pass with a running softmax. The structs are those of paged_attention.py. Vectors
// have 16 numbers; the compiler splits them where the processor's are shorter.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
typedef _Float16 Halves __attribute__((vector_size(32)));

const int WIDTH = 16;
const float HIDDEN = -1e30f;  // the flags of the compiler exclude infinities

static inline Floats load(const float* x) { Floats v; std::memcpy(&v, x, sizeof v); return v; }
static inline Floats load(const _Float16* x) {
    Halves v; std::memcpy(&v, x, sizeof v); return __builtin_convertvector(v, Floats);
}
static inline Floats load(const uint16_t* x) {  // bfloat16
    Shorts v; std::memcpy(&v, x, sizeof v); return (Floats)(__builtin_convertvector(v, Ints) << 16);
}
static inline void store(float* x, Floats v) { std::memcpy(x, &v, sizeof v); }
static inline void store(float* x, float value) { *x = value; }
static inline void store(_Float16* x, float value) { *x = (_Float16)value; }
static inline void store(uint16_t* x, float value) {
    uint32_t bits; std::memcpy(&bits, &value, 4); *x = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static inline Floats sums(Floats a, Floats b, Floats c, Floats d) {  // of each of the four, in the first four places
    const auto two = [](Floats x, Floats y) {
        return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
            + __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    };
    const Floats x = two(a, b), y = two(c, d);
    Floats v = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
        + __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    return v + __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
}

static inline float exponential(float x) {  // of x <= 0, to 2e-7: a loop over it becomes vectors
    x = std::max(x, -87.f) * 1.44269504f;
    const float whole = (float)(int)(x - 0.5f), r = (x - whole) * 0.693147181f;
    const int32_t bits = ((int32_t)whole + 127) << 23;
    float power; std::memcpy(&power, &bits, 4);
    return power * (1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r / 720.f))))));
}

struct Step {  // one new token of each request
    int64_t heads, kv_heads, size, head_dim, pairs, adjacent, requests, columns, blocks_each, versions, bias_heads;
    float softcap;
    const int32_t *first, *second;
    const float *query_cos, *query_sin, *key_cos, *key_sin, *scale;
    const int32_t *blocks, *lengths, *turn;
    const float* bias;
};

struct Part {  // some new tokens of one request
    int64_t heads, kv_heads, size, head_dim, pairs, adjacent, queries, regions;
    float softcap;
    const int32_t *first, *second;
    const float *query_cos, *query_sin, *key_cos, *key_sin, *scale;
    const int32_t *blocks, *begin, *end, *turned;
};

template <class Sizes>
static inline void rotate(float* x, const Sizes& p, const float* cos, const float* sin) {
    if (p.adjacent) {  // the first of all pairs in a row, then the second, and whole vectors of them
        for (int i = 0; i < p.pairs; i += WIDTH) {
            float *first = x + p.first[0] + i, *second = x + p.second[0] + i;
            const Floats a = load(first), b = load(second), c = load(cos + i), s = load(sin + i);
            store(first, a * c - b * s);
            store(second, b * c + a * s);
        }
        return;
    }
    for (int i = 0; i < p.pairs; i++) {
        float &a = x[p.first[i]], &b = x[p.second[i]], before = a;
        a = before * cos[i] - b * sin[i];
        b = b * cos[i] + before * sin[i];
    }
}

// Scores of some keys become weights beside the greatest score up to now, by which the result so far shrinks.
static inline void weigh(float* scores, int count, float& top, float& total, float* result, int dim) {
    float highest = top, added = 0;
    for (int j = 0; j < count; j++) highest = std::max(highest, scores[j]);
    for (int j = 0; j < count; j++) scores[j] = exponential(scores[j] - highest);
    for (int j = 0; j < count; j++) added += scores[j];
    const float shrink = exponential(top - highest);
    for (int i = 0; i < dim; i += WIDTH) store(result + i, load(result + i) * shrink);
    total = total * shrink + added;
    top = highest;
}

template <class T>
static inline void finish(const float* result, int dim, float top, float total, const float* sink, T* output) {
    const float highest = sink ? std::max(top, *sink) : top, shrink = exponential(top - highest);
    const float all = total * shrink + (sink ? exponential(*sink - highest) : 0.f);
    for (int i = 0; i < dim; i++) store(output + i, result[i] * shrink / all);
}

// G query heads of one request against one block: keys in float32 as turned, values as the cache has them.
template <int G, class T>
static void block(const Step& p, int64_t r, int64_t head, int64_t column, int count, const float* queries,
                  const float* keys, const T* values, float* weights, float* top, float* total, float* output) {
    const int dim = p.head_dim;
    const int32_t* turn = p.turn + r * p.columns + column;
    const int64_t each = p.heads / p.kv_heads * dim;
    for (int j = 0; j < count; j += 4) {  // the tile and the weights have places for whole fours
        const float *query[4], *key = keys + j * dim;
        for (int k = 0; k < 4; k++)
            query[k] = queries + std::clamp<int64_t>(turn[std::min(j + k, count - 1)], 0, p.versions - 1) * each;
        Floats products[G][4] = {};
        for (int i = 0; i < dim; i += WIDTH)
            for (int k = 0; k < 4; k++)
                for (int g = 0; g < G; g++) products[g][k] += load(query[k] + g * dim + i) * load(key + k * dim + i);
        for (int g = 0; g < G; g++) {
            const Floats four = sums(products[g][0], products[g][1], products[g][2], products[g][3]);
            std::memcpy(weights + g * p.size + j, &four, 4 * sizeof(float));
        }
    }
    for (int g = 0; g < G; g++) {
        float* w = weights + g * p.size;
        if (p.softcap) for (int j = 0; j < count; j++) w[j] = p.softcap * std::tanh(w[j] / p.softcap);
        if (p.bias) {
            const float* bias = p.bias + (r * p.bias_heads + (p.bias_heads > 1 ? head + g : 0)) * p.columns + column;
            for (int j = 0; j < count; j++) w[j] += bias[j];
        }
        for (int j = 0; j < count; j++) w[j] = turn[j] < 0 ? HIDDEN : w[j];
        weigh(w, count, top[g], total[g], output + g * dim, dim);
    }
    for (int i = 0; i < dim; i += WIDTH) {
        Floats mixed[G];
        for (int g = 0; g < G; g++) mixed[g] = load(output + g * dim + i);
        for (int j = 0; j < count; j++) {
            const Floats value = load(values + j * dim + i);
            for (int g = 0; g < G; g++) mixed[g] += weights[g * p.size + j] * value;
        }
        for (int g = 0; g < G; g++) store(output + g * dim + i, mixed[g]);
    }
}

template <class T>
static void attend(const Step& p, const T* query, const T* cache, const float* sinks, T* output) {
    const int dim = p.head_dim, group = p.heads / p.kv_heads, half = p.size * dim;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t r = 0; r < p.requests; r++)
        for (int64_t kv = 0; kv < p.kv_heads; kv++) {
            std::vector<float> queries(p.versions * group * dim), keys(half), weights(4 * p.size);
            std::vector<float> top(group, HIDDEN), total(group, 0.f), result(group * dim, 0.f);
            for (int v = 0; v < p.versions; v++)
                for (int g = 0; g < group; g++) {
                    float* x = &queries[(v * group + g) * dim];
                    const int64_t head = r * p.heads + kv * group + g, row = (v * p.requests + r) * p.pairs;
                    for (int i = 0; i < dim; i += WIDTH) store(x + i, load(query + head * dim + i) * p.scale[head]);
                    rotate(x, p, p.query_cos + row, p.query_sin + row);
                }
            for (int64_t column = 0; column < p.lengths[r]; column += p.size) {
                const int count = std::min<int64_t>(p.size, p.lengths[r] - column);
                const int32_t* turn = p.turn + r * p.columns + column;
                if (std::all_of(turn, turn + count, [](int32_t t) { return t < 0; })) continue;
                const T* held = cache + (p.blocks[r * p.blocks_each + column / p.size] * p.kv_heads + kv) * 2 * half;
                for (int j = 0; j < count; j++) {
                    for (int i = 0; i < dim; i += WIDTH) store(&keys[j * dim + i], load(held + j * dim + i));
                    const int64_t row = (turn[j] - (p.versions - 1)) * p.pairs;
                    if (row >= 0) rotate(&keys[j * dim], p, p.key_cos + row, p.key_sin + row);
                }
                for (int g = 0, most; g < group; g += most) {
                    most = std::min(group - g, 4);
                    (most == 4 ? block<4, T> : most == 3 ? block<3, T> : most == 2 ? block<2, T> : block<1, T>)(
                        p, r, kv * group + g, column, count, &queries[g * dim], keys.data(), held + half,
                        weights.data(), &top[g], &total[g], &result[g * dim]);
                }
            }
            for (int g = 0; g < group; g++) {
                const int64_t head = kv * group + g;
                finish(&result[g * dim], dim, top[g], total[g], sinks ? sinks + head : nullptr,
                       output + (r * p.heads + head) * dim);
            }
        }
}

const int ROWS = 8;

template <int VECTORS>  // c (ROWS, width) += a (ROWS, depth) b (depth, width), of which so many vectors of columns
static inline void multiply(const float* a, int row, int step, int depth, const float* b, int width, float* c) {
    Floats products[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECTORS; v++) products[i][v] = load(c + i * width + v * WIDTH);
    for (int k = 0; k < depth; k++)
        for (int v = 0; v < VECTORS; v++) {
            const Floats column = load(b + k * width + v * WIDTH);
            for (int i = 0; i < ROWS; i++) products[i][v] += a[i * row + k * step] * column;
        }
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECTORS; v++) store(c + i * width + v * WIDTH, products[i][v]);
}

// c (rows, width) += a (rows, depth), with its strides, times b (depth, width).
static void multiply(int rows, const float* a, int row, int step, int depth, const float* b, int width, float* c) {
    for (int column = 0; column < width; column += 2 * WIDTH)
        for (int i = 0; i < rows; i += ROWS)
            (width - column > WIDTH ? multiply<2> : multiply<1>)(
                a + i * row, row, step, depth, b + column, width, c + i * width + column);
}

template <class T>
static void attend(const Part& p, const T* query, const T* cache, const float* sinks, T* output) {
    const int dim = p.head_dim, size = p.size, group = p.heads / p.kv_heads, each = std::max(1, 96 / group);
    const int tiles = (p.queries + each - 1) / each, rows = (each * group + WIDTH - 1) / WIDTH * WIDTH;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int tile = tiles - 1; tile >= 0; tile--)
        for (int64_t kv = 0; kv < p.kv_heads; kv++) {
            const int64_t from = tile * each, count = std::min<int64_t>(each, p.queries - from) * group;
            std::vector<float> queries(p.regions * dim * rows), states(size * dim), row(dim), result(rows * dim);
            std::vector<float> scores(size * rows), products(size * rows), top(rows, HIDDEN), total(rows), shrink(rows);
            std::vector<int32_t> begin(p.regions * rows), end(p.regions * rows);  // of the keys that each row sees
            int longest = 0;
            for (int v = 0; v < p.regions; v++)
                for (int i = 0; i < count; i++) {
                    const int64_t m = from + i / group, head = m * p.heads + kv * group + i % group;
                    const int64_t at = v * p.queries + m;
                    for (int k = 0; k < dim; k += WIDTH) store(&row[k], load(query + head * dim + k) * p.scale[head]);
                    rotate(row.data(), p, p.query_cos + at * p.pairs, p.query_sin + at * p.pairs);
                    for (int k = 0; k < dim; k++) queries[(v * dim + k) * rows + i] = row[k];
                    begin[v * rows + i] = p.begin[at];
                    longest = std::max(longest, end[v * rows + i] = p.end[at]);
                }
            for (int column = 0; column < longest; column += size) {
                const T* held = cache + (p.blocks[column / size] * p.kv_heads + kv) * 2 * size * dim;
                const int used = std::min(size, longest - column);
                bool any = false;
                for (int v = 0; v < p.regions; v++) {
                    const int32_t *first = &begin[v * rows], *last = &end[v * rows];
                    bool some = false, all = true;
                    for (int i = 0; i < count; i++) {
                        some |= std::max(first[i], column) < std::min(last[i], column + size);
                        all &= first[i] <= column && column + size <= last[i];
                    }
                    if (!some) continue;
                    for (int j = 0; j < used; j++) {
                        for (int k = 0; k < dim; k += WIDTH) store(&states[j * dim + k], load(held + j * dim + k));
                        const int64_t table = (p.turned[v] + column + j) * p.pairs;
                        if (p.turned[v] >= 0) rotate(&states[j * dim], p, p.key_cos + table, p.key_sin + table);
                    }
                    std::fill(products.begin(), products.end(), 0.f);
                    multiply(size, states.data(), dim, 1, dim, &queries[v * dim * rows], rows, products.data());
                    if (all) {
                        std::swap(scores, products);
                    } else {
                        for (int j = 0; j < used; j++)
                            for (int i = 0; i < rows; i++) {
                                const float before = any ? scores[j * rows + i] : HIDDEN;
                                const bool inside = first[i] <= column + j && column + j < last[i];
                                scores[j * rows + i] = inside ? products[j * rows + i] : before;
                            }
                    }
                    any = true;
                }
                if (!any) continue;
                if (p.softcap)
                    for (float& x : scores) x = x > HIDDEN ? p.softcap * std::tanh(x / p.softcap) : x;
                shrink = top;
                for (int j = 0; j < used; j++)
                    for (int i = 0; i < rows; i++) top[i] = std::max(top[i], scores[j * rows + i]);
                for (int i = 0; i < rows; i++) shrink[i] = exponential(shrink[i] - top[i]), total[i] *= shrink[i];
                for (int j = 0; j < used; j++)
                    for (int i = 0; i < rows; i++)
                        total[i] += scores[j * rows + i] = exponential(scores[j * rows + i] - top[i]);
                for (int i = 0; i < rows; i++)
                    for (int k = 0; k < dim; k++) result[i * dim + k] *= shrink[i];
                for (int j = 0; j < used; j++)
                    for (int k = 0; k < dim; k += WIDTH) store(&states[j * dim + k], load(held + (size + j) * dim + k));
                multiply(rows, scores.data(), 1, rows, used, states.data(), dim, result.data());
            }
            for (int i = 0; i < count; i++) {
                const int64_t head = kv * group + i % group;
                finish(&result[i * dim], dim, top[i], total[i], sinks ? sinks + head : nullptr,
                       output + ((from + i / group) * p.heads + head) * dim);
            }
        }
}

// New keys and values, with these bytes of a head and from one token to the next, into their slots.
extern "C" void write(int64_t tokens, int64_t kv_heads, int64_t size, int64_t bytes, int64_t key_step,
                      int64_t value_step, const char* key, const char* value, const int64_t* slots, char* cache) {
    for (int64_t i = 0; i < tokens; i++)
        for (int64_t kv = 0; kv < kv_heads && slots[i] >= 0; kv++) {
            char* at = cache + ((slots[i] / size * kv_heads + kv) * 2 * size + slots[i] % size) * bytes;
            std::memcpy(at, key + i * key_step + kv * bytes, bytes);
            std::memcpy(at + size * bytes, value + i * value_step + kv * bytes, bytes);
        }
}

#define EXPORT(NAME, TYPE) \
    extern "C" void NAME(const Step* p, const TYPE* query, const TYPE* cache, const float* sinks, TYPE* output) { \
        attend(*p, query, cache, sinks, output); \
    } \
    extern "C" void part_##NAME(const Part* p, const TYPE* query, const TYPE* cache, const float* sinks, TYPE* out) { \
        attend(*p, query, cache, sinks, out); \
    }
EXPORT(float32, float)
EXPORT(float16, _Float16)
EXPORT(bfloat16, uint16_t)
