// Attention over a paged cache, in one pass with a running softmax. The structs are those of paged_attention.py.
// Vectors have 16 numbers; the compiler splits them where the processor's are shorter.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
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

// What the layers of a group share. Tables have a row for each position; those of cos and sin for each region too.
struct Group {
    int64_t heads, kv_heads, size, head_dim, pairs, adjacent, regions, positions, scale_step, bias_step;
    float softcap;
    const int32_t *first, *second;                // of each pair
    const int64_t *start, *stop, *chunk, *below;  // of each region
    const int64_t* turned;                        // place of a region among those whose keys are turned, or -1
    const float *query_cos, *query_sin, *key_cos, *key_sin, *scale, *bias;
};

struct Batch {  // the requests of a forward, of which those under this factor are scored
    int64_t requests, blocks_each, factor;
    const int32_t *begins, *lengths, *blocks;
    const int64_t* factors;

    int64_t queries(int64_t r) const { return factors && factors[r] != factor ? 0 : begins[r + 1] - begins[r]; }
};

template <class T>
struct Layer {
    int64_t query_step;  // from one token to the next
    const T *query, *cache;
    const float* sinks;
    T* output;
};

template <class T>  // the keys of a block of the cache, before its values
static inline const T* block(
    const Group& p, const Batch& batch, const Layer<T>& layer, int64_t r, int64_t kv, int64_t column) {
    const int64_t place = batch.blocks[r * batch.blocks_each + column / p.size];
    return layer.cache + (place * p.kv_heads + kv) * 2 * p.size * p.head_dim;
}

// Which keys the query at m sees in a region: the first one, and the one after the last.
static inline void seen(const Group& p, int region, int64_t m, int32_t& begin, int32_t& end) {
    const int64_t chunk = p.chunk[region], after = m / chunk + 1;
    begin = std::max<int64_t>(0, (after - p.stop[region]) * chunk);
    end = std::min({m + 1, (after - p.start[region]) * chunk, p.below[region]});
}

struct Numbers {  // aligned, so that no vector of them is in two lines of a cache
    std::vector<Floats> vectors;
    explicit Numbers(int64_t count, float value = 0) : vectors((count + WIDTH - 1) / WIDTH, Floats{} + value) {}
    float* data() { return (float*)vectors.data(); }
    float& operator[](int64_t i) { return data()[i]; }
};

template <class T>  // a state becomes x, which may be the same place
static inline void turn(const Group& p, const T* state, const float* cos, const float* sin, float* x) {
    const bool whole = p.adjacent && 2 * p.pairs == p.head_dim;
    for (int i = 0; i < p.head_dim && !whole; i += WIDTH) store(x + i, load(state + i));
    if (p.adjacent) {  // the first of all pairs in a row, then the second, and whole vectors of them
        for (int i = 0; i < p.pairs; i += WIDTH) {
            const Floats a = load(state + p.first[0] + i), b = load(state + p.second[0] + i);
            const Floats c = load(cos + i), s = load(sin + i);
            store(x + p.first[0] + i, a * c - b * s);
            store(x + p.second[0] + i, b * c + a * s);
        }
        return;
    }
    for (int i = 0; i < p.pairs; i++) {
        float &a = x[p.first[i]], &b = x[p.second[i]], before = a;
        a = before * cos[i] - b * sin[i];
        b = b * cos[i] + before * sin[i];
    }
}

template <class T>  // the query of a head at m, as a region wants it
static inline void turn_query(const Group& p, const T* query, int64_t head, int region, int64_t m, float* x) {
    const int64_t row = (region * p.positions + m) * p.pairs;
    const float scale = p.scale[m * p.scale_step + head];
    for (int i = 0; i < p.head_dim; i += WIDTH) store(x + i, load(query + head * p.head_dim + i) * scale);
    turn(p, x, p.query_cos + row, p.query_sin + row, x);
}

template <class T>  // the key at n, as a region wants it
static inline void turn_key(const Group& p, const T* key, int region, int64_t n, float* x) {
    const int64_t row = (p.turned[region] * p.positions + n) * p.pairs;
    if (p.turned[region] >= 0) return turn(p, key, p.key_cos + row, p.key_sin + row, x);
    for (int i = 0; i < p.head_dim; i += WIDTH) store(x + i, load(key + i));
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

// Scores of G query heads and four keys; `queries` are those for each key, perhaps the SAME ones.
template <bool SAME, int G, class T>
static inline void score(const Group& p, const float* const* queries, int64_t head, const T* keys, float* scores) {
    const int dim = p.head_dim;
    Floats products[G][4] = {};
    for (int i = 0; i < dim; i += WIDTH)
        for (int k = 0; k < 4; k++) {
            const Floats key = load(keys + k * dim + i);
            for (int g = 0; g < G; g++) products[g][k] += load(queries[SAME ? 0 : k] + (head + g) * dim + i) * key;
        }
    for (int g = 0; g < G; g++) {
        const Floats four = sums(products[g][0], products[g][1], products[g][2], products[g][3]);
        std::memcpy(scores + (head + g) * p.size, &four, 4 * sizeof(float));
    }
}

// Weights of G query heads times some vectors of values, from `i` on, added to their results.
template <int G, int VECTORS, class T>
static inline void mix(
    const Group& p, const float* weights, int64_t head, const T* values, int count, int i, float* result) {
    const int dim = p.head_dim;
    Floats mixed[G][VECTORS];
    for (int g = 0; g < G; g++)
        for (int v = 0; v < VECTORS; v++) mixed[g][v] = load(result + (head + g) * dim + i + v * WIDTH);
    for (int j = 0; j < count; j++)
        for (int v = 0; v < VECTORS; v++) {
            const Floats value = load(values + j * dim + i + v * WIDTH);
            for (int g = 0; g < G; g++) mixed[g][v] += weights[(head + g) * p.size + j] * value;
        }
    for (int g = 0; g < G; g++)
        for (int v = 0; v < VECTORS; v++) store(result + (head + g) * dim + i + v * WIDTH, mixed[g][v]);
}

// f for all heads, four at once: with the first one, and how many as a constant.
template <class F>
static inline void by_fours(int64_t heads, F f) {
    for (int64_t g = 0; g < heads; g += 4) {
        if (heads - g == 1) f(g, std::integral_constant<int, 1>());
        else if (heads - g == 2) f(g, std::integral_constant<int, 2>());
        else if (heads - g == 3) f(g, std::integral_constant<int, 3>());
        else f(g, std::integral_constant<int, 4>());
    }
}

template <class T>  // one new token of a request, for the query heads that share keys
static void attend_token(const Group& p, const Batch& batch, const Layer<T>& layer, int64_t r, int64_t kv) {
    const int64_t dim = p.head_dim, size = p.size, group = p.heads / p.kv_heads, m = batch.lengths[r] - 1;
    Numbers queries(p.regions * group * dim), scores(group * size), tile(4 * dim), result(group * dim);
    Numbers top(group, HIDDEN), total(group);
    std::vector<int32_t> begin(p.regions), end(p.regions), places(size);
    const T* query = layer.query + batch.begins[r] * layer.query_step;
    for (int v = 0; v < p.regions; v++) {
        seen(p, v, m, begin[v], end[v]);
        for (int64_t g = 0; g < group; g++)
            turn_query(p, query, kv * group + g, v, m, &queries[(v * group + g) * dim]);
    }
    for (int64_t column = 0; column <= m; column += size) {
        const int count = std::min(size, m + 1 - column);
        std::fill(places.begin(), places.end(), -1);
        for (int v = 0; v < p.regions; v++)
            for (int64_t n = std::max<int64_t>(begin[v], column); n < std::min<int64_t>(end[v], column + count); n++)
                places[n - column] = v;
        if (std::all_of(places.begin(), places.end(), [](int32_t v) { return v < 0; })) continue;
        const T* keys = block(p, batch, layer, r, kv, column);
        for (int64_t j = 0; j < count; j += 4) {
            const float* four[4];
            bool turned = false, same = true;
            for (int k = 0; k < 4; k++) {
                const int v = std::max(0, places[j + k]);
                four[k] = &queries[v * group * dim];
                turned |= p.turned[v] >= 0;
                same &= four[k] == four[0];
            }
            for (int k = 0; k < 4 && turned; k++)
                turn_key(p, keys + (j + k) * dim, std::max(0, places[j + k]), column + j + k, &tile[k * dim]);
            by_fours(group, [&](int64_t g, auto G) {
                if (!turned && same) score<true, G.value>(p, four, g, keys + j * dim, &scores[j]);
                else if (!turned) score<false, G.value>(p, four, g, keys + j * dim, &scores[j]);
                else if (same) score<true, G.value>(p, four, g, tile.data(), &scores[j]);
                else score<false, G.value>(p, four, g, tile.data(), &scores[j]);
            });
        }
        for (int64_t g = 0; g < group; g++) {
            float* x = &scores[g * size];
            if (p.softcap) for (int j = 0; j < count; j++) x[j] = p.softcap * std::tanh(x[j] / p.softcap);
            if (p.bias) {
                const float* bias = p.bias + (kv * group + g) * p.bias_step + m - column;
                for (int j = 0; j < count; j++) x[j] += bias[-j];
            }
            for (int j = 0; j < count; j++) x[j] = places[j] < 0 ? HIDDEN : x[j];
            weigh(x, count, top[g], total[g], &result[g * dim], dim);
        }
        by_fours(group, [&](int64_t g, auto G) {
            constexpr int most = G.value > 2 ? 2 : 4;  // about eight sums at once keep a processor busy
            int i = 0;
            for (; i + most * WIDTH <= dim; i += most * WIDTH)
                mix<G.value, most>(p, scores.data(), g, keys + size * dim, count, i, result.data());
            for (; i < dim; i += WIDTH)
                mix<G.value, 1>(p, scores.data(), g, keys + size * dim, count, i, result.data());
        });
    }
    for (int64_t g = 0; g < group; g++) {
        const int64_t head = kv * group + g;
        finish(&result[g * dim], dim, top[g], total[g], layer.sinks ? layer.sinks + head : nullptr,
               layer.output + (batch.begins[r] * p.heads + head) * dim);
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

template <class T>  // some new tokens of a request, as many as fit into a tile, for the query heads that share keys
static void attend_tile(
    const Group& p, const Batch& batch, const Layer<T>& layer, int64_t r, int64_t kv, int64_t from, int64_t tokens) {
    const int dim = p.head_dim, size = p.size, group = p.heads / p.kv_heads, count = tokens * group;
    const int rows = (count + WIDTH - 1) / WIDTH * WIDTH;
    const int64_t token = batch.begins[r] + from, m = batch.lengths[r] - batch.queries(r) + from;  // the first ones
    Numbers queries(p.regions * dim * rows), states(size * dim), row(dim), result(rows * dim);
    Numbers scores(size * rows), products(size * rows), top(rows, HIDDEN), total(rows), shrink(rows);
    std::vector<int32_t> begin(p.regions * rows), end(p.regions * rows);  // of the keys that each row sees
    int longest = 0;
    for (int v = 0; v < p.regions; v++)
        for (int i = 0; i < count; i++) {
            const T* query = layer.query + (token + i / group) * layer.query_step;
            turn_query(p, query, kv * group + i % group, v, m + i / group, row.data());
            for (int k = 0; k < dim; k++) queries[(v * dim + k) * rows + i] = row[k];
            seen(p, v, m + i / group, begin[v * rows + i], end[v * rows + i]);
            longest = std::max(longest, end[v * rows + i]);
        }
    for (int column = 0; column < longest; column += size) {
        const T* held = block(p, batch, layer, r, kv, column);
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
            for (int j = 0; j < used; j++) turn_key(p, held + j * dim, v, column + j, &states[j * dim]);
            std::fill(products.vectors.begin(), products.vectors.end(), Floats{});
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
            for (int i = 0; i < size * rows; i++)
                scores[i] = scores[i] > HIDDEN ? p.softcap * std::tanh(scores[i] / p.softcap) : scores[i];
        if (p.bias)
            for (int j = 0; j < used; j++)
                for (int i = 0; i < count; i++) {
                    const int64_t distance = std::max<int64_t>(0, m + i / group - column - j);
                    scores[j * rows + i] += p.bias[(kv * group + i % group) * p.bias_step + distance];
                }
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
        finish(&result[i * dim], dim, top[i], total[i], layer.sinks ? layer.sinks + head : nullptr,
               layer.output + ((token + i / group) * p.heads + head) * dim);
    }
}

template <class T>
static void attend(const Group& p, const Batch& batch, const Layer<T>& layer) {
    const int64_t each = std::max<int64_t>(1, 96 / (p.heads / p.kv_heads));  // tokens of a tile
    for (int64_t r = 0; r < batch.requests; r++) {
        const int64_t queries = batch.queries(r);
        if (queries < 2) continue;
#pragma omp parallel for collapse(2) schedule(dynamic)
        for (int64_t tile = (queries - 1) / each; tile >= 0; tile--)
            for (int64_t kv = 0; kv < p.kv_heads; kv++)
                attend_tile(p, batch, layer, r, kv, tile * each, std::min(each, queries - tile * each));
    }
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t r = 0; r < batch.requests; r++)
        for (int64_t kv = 0; kv < p.kv_heads; kv++)
            if (batch.queries(r) == 1) attend_token(p, batch, layer, r, kv);
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
    extern "C" void NAME(const Group* p, const Batch* batch, int64_t query_step, const TYPE* query, const TYPE* cache, \
                         const float* sinks, TYPE* output) { \
        attend<TYPE>(*p, *batch, {query_step, query, cache, sinks, output}); \
    }
EXPORT(float32, float)
EXPORT(float16, _Float16)
EXPORT(bfloat16, uint16_t)
