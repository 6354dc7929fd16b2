#include "graph/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "graph/attention_mask.hpp"

using namespace dflash;

namespace {

struct Shape {
    int64_t dim = 64;
    int64_t n_head = 4;
    int64_t n_head_kv = 2;
    int64_t n_kv = 256;
    int64_t n_rows = 1;
};

/// Everything of one call: rows of q and of the cache in `type`, and which keys each row sees.
struct Case {
    Shape shape;
    enum ggml_type type = GGML_TYPE_F32;
    std::vector<float> q;
    std::vector<uint8_t> k;
    std::vector<uint8_t> v;
    std::vector<uint16_t> mask;

    int64_t kv_width() const { return shape.dim * shape.n_head_kv; }
    bool visible(int64_t row, int64_t key) const { return mask[static_cast<size_t>(row * shape.n_kv + key)] == 0; }
};

Case make_case(const Shape & s, enum ggml_type type) {
    std::mt19937 generator(11);
    std::normal_distribution<float> normal;
    Case c;
    c.shape = s;
    c.type = type;
    c.q.resize(static_cast<size_t>(s.dim * s.n_head * s.n_rows));
    std::vector<float> rows(static_cast<size_t>(c.kv_width() * s.n_kv));
    for (float & value : c.q) {
        value = 3.0f * normal(generator);
    }
    for (std::vector<uint8_t> * to : {&c.k, &c.v}) {
        for (float & value : rows) {
            value = normal(generator);
        }
        to->resize(ggml_row_size(type, c.kv_width()) * static_cast<size_t>(s.n_kv));
        ggml_quantize_chunk(type, rows.data(), to->data(), 0, s.n_kv, c.kv_width(), nullptr);
    }
    c.mask.assign(static_cast<size_t>(s.n_kv * s.n_rows), mask_hidden);
    for (int64_t row = 0; row < s.n_rows; ++row) { // causal, the last row sees all but seven keys
        for (int64_t key = 0; key < s.n_kv - 6 - s.n_rows + row; ++key) {
            c.mask[static_cast<size_t>(row * s.n_kv + key)] = mask_visible;
        }
    }
    return c;
}

/// Rows [first, first + n) of a case, on a CPU with so many threads; [dim * n_head, n].
std::vector<float> attend(const Case & c, int64_t first, int64_t n, int n_threads = 1) {
    const Shape & s = c.shape;
    const auto device = Device::open("cpu", n_threads);
    Graph graph(device, 16);
    ggml_context * ctx = graph.ctx();
    ggml_tensor * q = graph.input(GGML_TYPE_F32, "q", s.dim * s.n_head, n);
    ggml_tensor * k = graph.input(c.type, "k", c.kv_width(), s.n_kv);
    ggml_tensor * v = graph.input(c.type, "v", c.kv_width(), s.n_kv);
    ggml_tensor * mask = graph.input(GGML_TYPE_F16, "mask", s.n_kv, n);
    ggml_tensor * out =
        build_attention(graph, ggml_reshape_3d(ctx, q, s.dim, s.n_head, n), k, v, mask, s.dim, s.n_head_kv, s.n_kv);
    graph.keep(out);
    graph.finish("attention");
    const size_t row = static_cast<size_t>(s.dim * s.n_head);
    graph.write(q, c.q.data() + static_cast<size_t>(first) * row, 0, static_cast<size_t>(n) * row * sizeof(float));
    graph.write(k, c.k.data(), 0, c.k.size());
    graph.write(v, c.v.data(), 0, c.v.size());
    graph.write(mask, c.mask.data() + first * s.n_kv, 0, static_cast<size_t>(n * s.n_kv) * sizeof(uint16_t));
    graph.compute();
    std::vector<float> result(static_cast<size_t>(n) * row);
    graph.read(out, result.data(), 0, result.size() * sizeof(float));
    return result;
}

std::vector<float> as_floats(const Case & c, const std::vector<uint8_t> & rows) {
    std::vector<float> out(static_cast<size_t>(c.kv_width() * c.shape.n_kv));
    if (c.type == GGML_TYPE_F32) {
        std::memcpy(out.data(), rows.data(), rows.size());
    } else {
        ggml_get_type_traits(c.type)->to_float(rows.data(), out.data(), static_cast<int64_t>(out.size()));
    }
    return out;
}

/// softmax(q k / sqrt(dim)) v in double precision, key after key.
std::vector<double> reference(const Case & c) {
    const Shape & s = c.shape;
    const std::vector<float> keys = as_floats(c, c.k);
    const std::vector<float> values = as_floats(c, c.v);
    std::vector<double> out;
    for (int64_t row = 0; row < s.n_rows; ++row) {
        for (int64_t head = 0; head < s.n_head; ++head) {
            const float * q = c.q.data() + (row * s.n_head + head) * s.dim;
            const int64_t at = head / (s.n_head / s.n_head_kv) * s.dim;
            std::vector<double> scores;
            for (int64_t key = 0; key < s.n_kv; ++key) {
                double score = 0.0;
                for (int64_t d = 0; d < s.dim; ++d) {
                    score += double{q[d]} * double{keys[static_cast<size_t>(key * c.kv_width() + at + d)]};
                }
                scores.push_back(c.visible(row, key) ? score / std::sqrt(static_cast<double>(s.dim)) : -INFINITY);
            }
            const double high = *std::max_element(scores.begin(), scores.end());
            std::vector<double> sums(static_cast<size_t>(s.dim));
            double total = 0.0;
            for (int64_t key = 0; key < s.n_kv; ++key) {
                const double weight = high == -INFINITY ? 0.0 : std::exp(scores[static_cast<size_t>(key)] - high);
                total += weight;
                for (int64_t d = 0; d < s.dim && weight > 0.0; ++d) {
                    sums[static_cast<size_t>(d)] +=
                        weight * double{values[static_cast<size_t>(key * c.kv_width() + at + d)]};
                }
            }
            for (const double sum : sums) {
                out.push_back(total > 0.0 ? sum / total : 0.0);
            }
        }
    }
    return out;
}

double largest_difference(const std::vector<float> & got, const std::vector<double> & want) {
    double largest = got.size() == want.size() ? 0.0 : INFINITY;
    for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
        const double difference = std::fabs(double{got[i]} - want[i]);
        largest = difference <= largest ? largest : difference; // a NaN counts as the largest
    }
    return largest;
}

} // namespace

TEST(it_is_softmax_of_scores_times_values) {
    const Shape shapes[] = {
        {64, 4, 2, 256, 1},   {64, 4, 2, 256, 16}, {16, 1, 1, 17, 3},    {48, 6, 2, 100, 5},
        {128, 8, 1, 1100, 2}, {256, 6, 2, 600, 9}, {64, 4, 4, 1024, 70}, {80, 3, 3, 513, 33},
    };
    for (const Shape & shape : shapes) {
        const Case c = make_case(shape, GGML_TYPE_F32);
        const double difference = largest_difference(attend(c, 0, shape.n_rows), reference(c));
        CHECK(difference < 5e-6);
    }
}

TEST(every_type_of_keys_and_values) {
    for (const enum ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0,
                                      GGML_TYPE_Q4_1, GGML_TYPE_Q4_0}) {
        const Case c = make_case({64, 4, 2, 700, 6}, type);
        CHECK(largest_difference(attend(c, 0, 6), reference(c)) < 5e-6);
    }
}

TEST(a_row_has_the_same_bits_among_any_rows_and_threads) {
    for (const enum ggml_type type : {GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_Q8_0}) {
        for (const int64_t n_kv : {int64_t{200}, int64_t{1300}}) {
            const Shape shape{64, 4, 2, n_kv, 70};
            const Case c = make_case(shape, type);
            const std::vector<float> all = attend(c, 0, 70);
            const size_t width = static_cast<size_t>(shape.dim * shape.n_head);
            for (const int n_threads : {1, 2, 5}) {
                CHECK(attend(c, 0, 70, n_threads) == all);
                for (const int64_t n : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{16}, int64_t{33}}) {
                    for (const int64_t first : {int64_t{0}, int64_t{7}, int64_t{70} - n}) {
                        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(width) * first;
                        const std::vector<float> want(begin, begin + static_cast<std::ptrdiff_t>(width) * n);
                        CHECK(attend(c, first, n, n_threads) == want);
                    }
                }
            }
        }
    }
}

TEST(hidden_keys_may_be_anything_and_lie_anywhere) {
    // The same visible keys in other rows of the cache, with rows of not-a-number in between.
    const Shape shape{64, 4, 2, 320, 2};
    Case c = make_case(shape, GGML_TYPE_F32);
    const int64_t n = 120;
    std::fill(c.mask.begin(), c.mask.end(), mask_hidden);
    for (int64_t row = 0; row < 2; ++row) {
        for (int64_t key = 0; key < n; ++key) {
            c.mask[static_cast<size_t>(row * shape.n_kv + key)] = mask_visible;
        }
    }
    const std::vector<float> dense = attend(c, 0, 2);
    CHECK(largest_difference(dense, reference(c)) < 5e-6);
    Case spread = c;
    std::fill(spread.mask.begin(), spread.mask.end(), mask_hidden);
    const size_t row_floats = static_cast<size_t>(c.kv_width());
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const bool keys : {true, false}) {
        auto * to = reinterpret_cast<float *>((keys ? spread.k : spread.v).data());
        const auto * from = reinterpret_cast<const float *>((keys ? c.k : c.v).data());
        std::fill(to, to + row_floats * static_cast<size_t>(shape.n_kv), nan);
        for (int64_t key = 0; key < n; ++key) {
            const int64_t place = key + (key > 50 ? 3 : 0) + (key > 90 ? 97 : 0);
            std::copy(from + static_cast<size_t>(key) * row_floats, from + static_cast<size_t>(key + 1) * row_floats,
                      to + static_cast<size_t>(place) * row_floats);
            spread.mask[static_cast<size_t>(place)] = mask_visible;
            spread.mask[static_cast<size_t>(shape.n_kv + place)] = mask_visible;
        }
    }
    CHECK(attend(spread, 0, 2) == dense);
}

TEST(a_row_that_sees_nothing_is_zero) {
    Case c = make_case({64, 4, 2, 1100, 3}, GGML_TYPE_F16);
    std::fill(c.mask.begin() + 1100, c.mask.begin() + 2200, mask_hidden);
    for (const int n_threads : {1, 4}) {
        const std::vector<float> got = attend(c, 0, 3, n_threads);
        CHECK(std::all_of(got.begin() + 256, got.begin() + 512, [](float x) { return x == 0.0f; }));
        CHECK(largest_difference(got, reference(c)) < 5e-6);
    }
}

TEST(scores_of_any_size_neither_overflow_nor_hide_a_fault) {
    for (const float scale : {1e-30f, 1e3f, 1e6f}) {
        Case c = make_case({64, 2, 2, 128, 1}, GGML_TYPE_F32);
        for (float & value : c.q) {
            value *= scale;
        }
        const std::vector<float> got = attend(c, 0, 1);
        CHECK(std::all_of(got.begin(), got.end(), [](float x) { return std::isfinite(x) && std::fabs(x) < 10.0f; }));
    }
    Case c = make_case({64, 2, 2, 128, 1}, GGML_TYPE_F32);
    reinterpret_cast<float *>(c.k.data())[3] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> got = attend(c, 0, 1);
    CHECK(std::isnan(got[0]));
    CHECK(!std::isnan(got[64]));
}
