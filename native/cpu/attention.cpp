#include "cpu/attention.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <new>

#include "cpu/simd.hpp"

namespace dflash::cpu {
namespace {

constexpr int64_t block = 64;       // keys that are unpacked at a time
constexpr int64_t max_queries = 64; // rows times heads that share them
constexpr int key_vectors = lanes == 16 ? 4 : 2;
constexpr double log2_of_e = 1.44269504088896340736;
constexpr float lowest = -std::numeric_limits<float>::infinity();

/// Memory of one thread, kept from call to call.
class Scratch {
  public:
    ~Scratch() { release(); }
    float * take(size_t n) {
        if (n > size_) {
            release();
            data_ = static_cast<float *>(::operator new(n * sizeof(float), std::align_val_t{64}));
            size_ = n;
        }
        return data_;
    }

  private:
    void release() {
        if (data_ != nullptr) {
            ::operator delete(data_, std::align_val_t{64});
        }
        data_ = nullptr;
    }
    float * data_ = nullptr;
    size_t size_ = 0;
};

thread_local Scratch scratch;

/// Rows [first_row, end_row) of the heads that share key head `head`: query i is of row i / group, head i % group.
struct Tile {
    int64_t head = 0;
    int64_t first_row = 0;
    int64_t end_row = 0;
    int64_t group = 0;
    int64_t n_queries() const { return (end_row - first_row) * group; }
};

struct Buffers {
    float * q;       // [n_queries, head_dim], scaled so that weights are powers of two
    float * k;       // [head_dim, block]: keys side by side
    float * v;       // [block, head_dim]
    float * rows;    // [block, head_dim]: keys as they come
    float * scores;  // [n_queries, block]
    float * acc;     // [n_queries, head_dim]
    float * largest; // [n_queries], of the scores, rounded up to an integer
    float * sums;    // [n_queries]
    float * total;   // [n_queries, partial width]

    Buffers(int64_t nq, int64_t dim) {
        const int64_t width = attention_partial_width(dim);
        const int64_t sizes[] = {nq * dim, dim * block, block * dim, block * dim, nq * block,
                                 nq * dim, max_queries, max_queries, nq * width};
        float ** const parts[] = {&q, &k, &v, &rows, &scores, &acc, &largest, &sums, &total};
        int64_t n = 0;
        for (const int64_t size : sizes) {
            n += size;
        }
        float * at = scratch.take(static_cast<size_t>(n));
        for (size_t i = 0; i < std::size(sizes); ++i) {
            *parts[i] = at;
            at += sizes[i];
        }
    }
};

/// Bit i: key i of the block is visible to the row.
uint64_t visible_keys(const uint16_t * mask, int64_t n) {
    uint64_t bits = 0;
#if defined(__AVX512BW__)
    if (n == block) {
        for (int part = 0; part < 2; ++part) {
            const __m512i m = _mm512_loadu_si512(mask + 32 * part);
            bits |= static_cast<uint64_t>(_mm512_testn_epi16_mask(m, m)) << (32 * part);
        }
        return bits;
    }
#endif
    for (int64_t i = 0; i < n; ++i) {
        bits |= static_cast<uint64_t>(mask[i] == 0) << i;
    }
    return bits;
}

int64_t round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

const float * key_as_float(const KeyRows & rows, const uint8_t * from, float * to, int64_t dim) {
    if (rows.type == KeyRows::Type::f32) {
        return reinterpret_cast<const float *>(from);
    }
    if (rows.type == KeyRows::Type::f16 && converts_half) {
        for (int64_t d = 0; d < dim; d += lanes) {
            store(to + d, load_half(reinterpret_cast<const uint16_t *>(from) + d));
        }
    } else {
        rows.to_float(from, to, dim);
    }
    return to;
}

/// Keys of a block, side by side: k[d * block + i]. Those that no row sees are zero: they may be anything in memory.
void unpack_keys(const KeyRows & rows, int64_t head, int64_t first, int64_t n, uint64_t wanted, int64_t dim,
                 Buffers & b) {
    const uint8_t * data = rows.data + static_cast<size_t>(head) * rows.head_stride;
    const float * key[block] = {};
    for (int64_t i = 0; i < n; ++i) {
        if ((wanted >> i & 1) != 0) {
            key[i] = key_as_float(rows, data + static_cast<size_t>(first + i) * rows.key_stride, b.rows + i * dim, dim);
        }
    }
    for (int64_t i = 0; i < n; i += lanes) {
        for (int64_t d = 0; d < dim; d += lanes) {
            Floats square[lanes];
            for (int j = 0; j < lanes; ++j) {
                square[j] = key[i + j] != nullptr ? load(key[i + j] + d) : Floats{};
            }
            transpose(square);
            for (int j = 0; j < lanes; ++j) {
                store(b.k + (d + j) * block + i, square[j]);
            }
        }
    }
}

void unpack_values(const KeyRows & rows, int64_t head, int64_t first, int64_t n, uint64_t wanted, int64_t dim,
                   Buffers & b) {
    const uint8_t * data = rows.data + static_cast<size_t>(head) * rows.head_stride;
    for (int64_t i = 0; i < n; ++i) {
        float * to = b.v + i * dim;
        if ((wanted >> i & 1) == 0) {
            std::fill(to, to + dim, 0.0f);
            continue;
        }
        const float * from = key_as_float(rows, data + static_cast<size_t>(first + i) * rows.key_stride, to, dim);
        if (from != to) {
            std::copy(from, from + dim, to);
        }
    }
}

/// scores[q][key] = q . k for `queries` queries and `vectors` registers of keys.
template <int queries, int vectors> void score_block(const float * q, const float * k, float * scores, int64_t dim) {
    Floats acc[queries][vectors] = {};
    for (int64_t d = 0; d < dim; ++d) {
        Floats key[vectors];
        for (int j = 0; j < vectors; ++j) {
            key[j] = load(k + d * block + j * lanes);
        }
        for (int i = 0; i < queries; ++i) {
            const Floats value = all(q[i * dim + d]);
            for (int j = 0; j < vectors; ++j) {
                acc[i][j] = multiply_add(value, key[j], acc[i][j]);
            }
        }
    }
    for (int i = 0; i < queries; ++i) {
        for (int j = 0; j < vectors; ++j) {
            store(scores + i * block + j * lanes, acc[i][j]);
        }
    }
}

template <int queries> void score_queries(const float * q, const float * k, float * scores, int64_t n, int64_t dim) {
    int64_t i = 0;
    for (; i + key_vectors * lanes <= n; i += key_vectors * lanes) {
        score_block<queries, key_vectors>(q, k + i, scores + i, dim);
    }
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
        score_block<queries, 2>(q, k + i, scores + i, dim);
    }
    for (; i < n; i += lanes) {
        score_block<queries, 1>(q, k + i, scores + i, dim);
    }
}

/// acc[q][d] += sum over keys of p[q][key] * v[key][d], key after key; sums[q] += those of p where wanted.
template <int queries, int vectors, bool with_sums>
void value_block(const float * p, const float * v, float * acc, float * sums, int64_t n, int64_t dim) {
    Floats sum[queries][vectors];
    Floats weights[queries];
    for (int i = 0; i < queries; ++i) {
        for (int j = 0; j < vectors; ++j) {
            sum[i][j] = load(acc + i * dim + j * lanes);
        }
        weights[i] = all(sums[i]);
    }
    for (int64_t key = 0; key < n; ++key) {
        Floats value[vectors];
        for (int j = 0; j < vectors; ++j) {
            value[j] = load(v + key * dim + j * lanes);
        }
        for (int i = 0; i < queries; ++i) {
            const Floats weight = all(p[i * block + key]);
            for (int j = 0; j < vectors; ++j) {
                sum[i][j] = multiply_add(weight, value[j], sum[i][j]);
            }
            if (with_sums) {
                weights[i] = weights[i] + weight;
            }
        }
    }
    for (int i = 0; i < queries; ++i) {
        for (int j = 0; j < vectors; ++j) {
            store(acc + i * dim + j * lanes, sum[i][j]);
        }
        if (with_sums) {
            sums[i] = weights[i][0];
        }
    }
}

template <int queries>
void value_queries(const float * p, const float * v, float * acc, float * sums, int64_t n, int64_t dim) {
    int64_t d = lanes;
    if (dim >= key_vectors * lanes) {
        value_block<queries, key_vectors, true>(p, v, acc, sums, n, dim);
        d = key_vectors * lanes;
    } else {
        value_block<queries, 1, true>(p, v, acc, sums, n, dim);
    }
    for (; d + key_vectors * lanes <= dim; d += key_vectors * lanes) {
        value_block<queries, key_vectors, false>(p, v + d, acc + d, sums, n, dim);
    }
    for (; d < dim; d += lanes) {
        value_block<queries, 1, false>(p, v + d, acc + d, sums, n, dim);
    }
}

void scale_values(float * values, Floats scale, int64_t n) {
    for (int64_t i = 0; i < n; i += lanes) {
        store(values + i, load(values + i) * scale);
    }
}

/// Scores of one query become weights; what was summed up so far is scaled to the new largest score. Scales are powers
/// of two, and sums go on key after key: so hidden keys in between change no bit of the result.
void weigh(float * scores, uint64_t visible, int64_t n, float & largest, float & sum, float * acc, int64_t dim) {
    if (visible == 0) {
        std::fill(scores, scores + n, 0.0f);
        return;
    }
    Ints lane;
    for (int i = 0; i < lanes; ++i) {
        lane[i] = 1 << i;
    }
    Floats newest = all(largest);
    for (int64_t i = 0; i < n; i += lanes) {
        const Ints bits = (Ints{} + static_cast<int32_t>(visible >> i & ((1u << lanes) - 1))) & lane;
        const Floats score = bits != 0 ? load(scores + i) : all(lowest);
        store(scores + i, score);
        newest = larger(newest, score);
    }
    const float high = std::ceil(largest_of(newest));
    if (high > largest) {
        if (largest != lowest) {
            const Floats scale = power_of_two(all(largest), high);
            sum *= scale[0];
            scale_values(acc, scale, dim);
        }
        largest = high;
    }
    for (int64_t i = 0; i < n; i += lanes) {
        store(scores + i, power_of_two(load(scores + i), largest));
    }
}

void load_queries(const AttentionCall & c, const Tile & tile, Buffers & b) {
    const Floats scale = all(static_cast<float>(log2_of_e / std::sqrt(static_cast<double>(c.head_dim))));
    for (int64_t i = 0; i < tile.n_queries(); ++i) {
        const int64_t row = tile.first_row + i / tile.group;
        const int64_t head = tile.head * tile.group + i % tile.group;
        const auto * q = reinterpret_cast<const float *>(c.q + static_cast<size_t>(row) * c.q_row_stride +
                                                         static_cast<size_t>(head) * c.q_head_stride);
        for (int64_t d = 0; d < c.head_dim; d += lanes) {
            store(b.q + i * c.head_dim + d, load(q + d) * scale);
        }
    }
}

/// Sums over keys [first, end) into b.acc, b.largest and b.sums.
void attend_part(const AttentionCall & c, const Tile & tile, int64_t first, int64_t end, Buffers & b) {
    const int64_t nq = tile.n_queries();
    const int64_t dim = c.head_dim;
    std::fill(b.acc, b.acc + nq * dim, 0.0f);
    std::fill(b.largest, b.largest + nq, lowest);
    std::fill(b.sums, b.sums + nq, 0.0f);
    for (int64_t at = first; at < end; at += block) {
        uint64_t visible[max_queries]; // of each row
        uint64_t any = 0;
        for (int64_t row = tile.first_row; row < tile.end_row; ++row) {
            const auto * mask =
                reinterpret_cast<const uint16_t *>(c.mask + static_cast<size_t>(row) * c.mask_stride) + at;
            any |= visible[row - tile.first_row] = visible_keys(mask, std::min(block, end - at));
        }
        if (any == 0) {
            continue;
        }
        int64_t n_keys = block;
        while ((any >> (n_keys - 1) & 1) == 0) {
            --n_keys;
        }
        const int64_t n = round_up(n_keys, lanes);
        unpack_keys(c.k, tile.head, at, n, any, dim, b);
        unpack_values(c.v, tile.head, at, n_keys, any, dim, b);
        int64_t i = 0;
        for (; i + 4 <= nq; i += 4) {
            score_queries<4>(b.q + i * dim, b.k, b.scores + i * block, n, dim);
        }
        for (; i + 2 <= nq; i += 2) {
            score_queries<2>(b.q + i * dim, b.k, b.scores + i * block, n, dim);
        }
        for (; i < nq; ++i) {
            score_queries<1>(b.q + i * dim, b.k, b.scores + i * block, n, dim);
        }
        for (i = 0; i < nq; ++i) {
            weigh(b.scores + i * block, visible[i / tile.group], n, b.largest[i], b.sums[i], b.acc + i * dim, dim);
        }
        for (i = 0; i + 4 <= nq; i += 4) {
            value_queries<4>(b.scores + i * block, b.v, b.acc + i * dim, b.sums + i, n_keys, dim);
        }
        for (; i + 2 <= nq; i += 2) {
            value_queries<2>(b.scores + i * block, b.v, b.acc + i * dim, b.sums + i, n_keys, dim);
        }
        for (; i < nq; ++i) {
            value_queries<1>(b.scores + i * block, b.v, b.acc + i * dim, b.sums + i, n_keys, dim);
        }
    }
}

/// What attend_part() found for query i: head_dim sums, then the largest score and the sum of weights.
void write_partial(const Buffers & b, int64_t i, int64_t dim, float * to) {
    std::copy(b.acc + i * dim, b.acc + (i + 1) * dim, to);
    to[dim] = b.largest[i];
    to[dim + 1] = b.sums[i];
}

void add_partial(const float * part, float * total, int64_t dim) {
    if (part[dim] == lowest) {
        return;
    }
    if (total[dim] == lowest) {
        std::copy(part, part + dim + 2, total);
        return;
    }
    const float high = std::max(part[dim], total[dim]);
    const Floats old_scale = power_of_two(all(total[dim]), high);
    const Floats new_scale = power_of_two(all(part[dim]), high);
    for (int64_t d = 0; d < dim; d += lanes) {
        store(total + d, multiply_add(load(total + d), old_scale, load(part + d) * new_scale));
    }
    total[dim + 1] = total[dim + 1] * old_scale[0] + part[dim + 1] * new_scale[0];
    total[dim] = high;
}

void finish(const float * total, float * out, int64_t dim) {
    const Floats scale = all(total[dim] == lowest ? 0.0f : 1.0f / total[dim + 1]);
    for (int64_t d = 0; d < dim; d += lanes) {
        store(out + d, load(total + d) * scale);
    }
}

int64_t rows_of_tile(int64_t group) {
    return std::max<int64_t>(1, max_queries / group);
}

Tile tile_at(const AttentionCall & c, int64_t piece) {
    Tile tile;
    tile.group = c.n_head / c.n_head_kv;
    const int64_t rows = rows_of_tile(tile.group);
    tile.head = piece % c.n_head_kv;
    tile.first_row = piece / c.n_head_kv * rows;
    tile.end_row = std::min(c.n_rows, tile.first_row + rows);
    return tile;
}

int64_t parts_of(const AttentionCall & c) {
    return (c.n_kv + attention_part - 1) / attention_part;
}

} // namespace

int64_t attention_pieces(int64_t n_rows, int64_t n_head, int64_t n_head_kv) {
    const int64_t rows = rows_of_tile(n_head / n_head_kv);
    return (n_rows + rows - 1) / rows * n_head_kv;
}

int64_t attention_partial_width(int64_t head_dim) {
    return head_dim + 16; // the two numbers, in a cache line of their own
}

void attention(const AttentionCall & c, float * out, int ith, int nth) {
    const int64_t dim = c.head_dim;
    const int64_t width = attention_partial_width(dim);
    const int64_t pieces = attention_pieces(c.n_rows, c.n_head, c.n_head_kv);
    for (int64_t piece = ith; piece < pieces; piece += nth) {
        const Tile tile = tile_at(c, piece);
        const int64_t nq = tile.n_queries();
        Buffers b(nq, dim);
        load_queries(c, tile, b);
        for (int64_t i = 0; i < nq; ++i) {
            b.total[i * width + dim] = lowest;
        }
        for (int64_t part = 0; part < parts_of(c); ++part) {
            const int64_t first = part * attention_part;
            attend_part(c, tile, first, std::min(c.n_kv, first + attention_part), b);
            for (int64_t i = 0; i < nq; ++i) {
                float * found = b.rows; // free by now
                write_partial(b, i, dim, found);
                add_partial(found, b.total + i * width, dim);
            }
        }
        for (int64_t i = 0; i < nq; ++i) {
            const int64_t row = tile.first_row + i / tile.group;
            const int64_t head = tile.head * tile.group + i % tile.group;
            finish(b.total + i * width, out + (row * c.n_head + head) * dim, dim);
        }
    }
}

void attention_partial(const AttentionCall & c, float * partials, int ith, int nth) {
    const int64_t dim = c.head_dim;
    const int64_t width = attention_partial_width(dim);
    const int64_t pieces = attention_pieces(c.n_rows, c.n_head, c.n_head_kv);
    for (int64_t unit = ith; unit < pieces * parts_of(c); unit += nth) {
        const Tile tile = tile_at(c, unit % pieces);
        const int64_t part = unit / pieces;
        const int64_t first = part * attention_part;
        Buffers b(tile.n_queries(), dim);
        load_queries(c, tile, b);
        attend_part(c, tile, first, std::min(c.n_kv, first + attention_part), b);
        for (int64_t i = 0; i < tile.n_queries(); ++i) {
            const int64_t row = tile.first_row + i / tile.group;
            const int64_t head = tile.head * tile.group + i % tile.group;
            write_partial(b, i, dim, partials + ((part * c.n_rows + row) * c.n_head + head) * width);
        }
    }
}

void attention_merge(const float * partials, int64_t head_dim, int64_t n, int64_t n_parts, float * out, int ith,
                     int nth) {
    const int64_t width = attention_partial_width(head_dim);
    float * total = scratch.take(static_cast<size_t>(width));
    for (int64_t i = ith; i < n; i += nth) {
        total[head_dim] = lowest;
        for (int64_t part = 0; part < n_parts; ++part) {
            add_partial(partials + (part * n + i) * width, total, head_dim);
        }
        finish(total, out + i * head_dim, head_dim);
    }
}

} // namespace dflash::cpu
