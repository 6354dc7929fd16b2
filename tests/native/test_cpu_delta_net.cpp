#include "graph/delta_net.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.hpp"

using namespace dflash;

namespace {

struct Case {
    int64_t s = 64;
    int64_t hk = 2;
    int64_t hv = 4;
    int64_t n = 1; // tokens
    std::vector<float> q, k, v, g, beta, state;
};

Case make_case(int64_t s, int64_t hk, int64_t hv, int64_t n) {
    std::mt19937 generator(5);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    Case c{s, hk, hv, n, {}, {}, {}, {}, {}, {}};
    const auto fill = [&](std::vector<float> & to, int64_t count, float scale) {
        for (int64_t i = 0; i < count; ++i) {
            to.push_back(scale * normal(generator));
        }
    };
    const float unit = 1.0f / std::sqrt(static_cast<float>(s));
    fill(c.q, s * hk * n, unit);
    fill(c.k, s * hk * n, unit);
    fill(c.v, s * hv * n, 1.0f);
    fill(c.state, s * s * hv, 0.3f);
    for (int64_t i = 0; i < hv * n; ++i) {
        c.g.push_back(-0.2f * uniform(generator));
        c.beta.push_back(uniform(generator));
    }
    return c;
}

struct Result {
    std::vector<float> out;   // [s * hv, n]
    std::vector<float> state; // `state` behind the run
    std::vector<float> each;  // [s, s, hv, n], newest first
};

enum class How { rule, state_only, stock };

Result run(const Case & c, DeltaState what, How how = How::rule, int n_threads = 1) {
    const auto device = Device::open("cpu", n_threads);
    Graph graph(device, 16);
    ggml_context * ctx = graph.ctx();
    const auto input = [&](const char * name, int64_t ne0, int64_t ne1, int64_t ne2) {
        return ggml_reshape_3d(ctx, graph.input(GGML_TYPE_F32, name, ne0 * ne1, ne2), ne0, ne1, ne2);
    };
    ggml_tensor * q = input("q", c.s, c.hk, c.n);
    ggml_tensor * k = input("k", c.s, c.hk, c.n);
    ggml_tensor * v = input("v", c.s, c.hv, c.n);
    ggml_tensor * g = input("g", 1, c.hv, c.n);
    ggml_tensor * beta = input("beta", 1, c.hv, c.n);
    ggml_tensor * state = input("state", c.s, c.s, c.hv);
    ggml_tensor * out = nullptr;
    if (how == How::state_only) {
        build_delta_state(graph, k, v, g, beta, state);
        graph.keep(state);
    } else {
        out = how == How::rule ? build_delta_rule(graph, q, k, v, g, beta, state, what)
                               : ggml_gated_delta_net(ctx, q, k, v, g, beta, state, c.n);
        graph.keep(out);
    }
    graph.finish("delta rule");
    const auto write = [&](ggml_tensor * to, const std::vector<float> & from) {
        graph.write(to->view_src, from.data(), 0, from.size() * sizeof(float));
    };
    if (how != How::state_only) {
        write(q, c.q);
    }
    write(k, c.k);
    write(v, c.v);
    write(g, c.g);
    write(beta, c.beta);
    write(state, c.state);
    graph.compute();
    Result r;
    const auto read = [&](std::vector<float> & to, ggml_tensor * from, int64_t offset, int64_t count) {
        to.resize(static_cast<size_t>(count));
        graph.read(from, to.data(), static_cast<uint64_t>(offset) * sizeof(float), to.size() * sizeof(float));
    };
    if (out != nullptr) {
        read(r.out, out, 0, c.s * c.hv * c.n);
        if (how == How::stock || what == DeltaState::each) {
            read(r.each, out, c.s * c.hv * c.n, c.s * c.s * c.hv * c.n);
        }
    }
    read(r.state, state->view_src, 0, c.s * c.s * c.hv);
    return r;
}

double largest_difference(const std::vector<float> & a, const std::vector<float> & b) {
    double largest = a.size() == b.size() && !a.empty() ? 0.0 : INFINITY;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        const double difference = std::fabs(double{a[i]} - double{b[i]});
        largest = difference <= largest ? largest : difference;
    }
    return largest;
}

std::vector<float> front(const std::vector<float> & values, int64_t n) {
    return {values.begin(), values.begin() + n};
}

/// The first n tokens of a case.
Case first_tokens(Case c, int64_t n) {
    c.n = n;
    c.q.resize(static_cast<size_t>(c.s * c.hk * n));
    c.k.resize(static_cast<size_t>(c.s * c.hk * n));
    c.v.resize(static_cast<size_t>(c.s * c.hv * n));
    c.g.resize(static_cast<size_t>(c.hv * n));
    c.beta.resize(static_cast<size_t>(c.hv * n));
    return c;
}

} // namespace

TEST(it_is_what_ggml_computes) {
    for (const int64_t s : {16, 32, 64, 128}) {
        const Case c = make_case(s, 2, 4, 9);
        const Result want = run(c, DeltaState::each, How::stock);
        const Result got = run(c, DeltaState::each);
        CHECK(largest_difference(got.out, want.out) < 1e-5);
        CHECK(largest_difference(got.each, want.each) < 1e-5);
        CHECK(got.state == c.state);
        CHECK(run(c, DeltaState::drop).out == got.out);
        CHECK(run(c, DeltaState::drop).state == c.state);
    }
}

TEST(heads_may_outnumber_those_of_keys) {
    for (const auto & [hk, hv] : {std::pair<int64_t, int64_t>{1, 1}, {1, 3}, {2, 6}}) {
        const Case c = make_case(64, hk, hv, 5);
        CHECK(largest_difference(run(c, DeltaState::drop).out, run(c, DeltaState::drop, How::stock).out) < 1e-5);
    }
}

TEST(a_token_gives_the_same_bits_whatever_follows) {
    const Case c = make_case(64, 2, 4, 150); // more than are taken at a time
    const Result all = run(c, DeltaState::write);
    for (const int n_threads : {1, 2, 5}) {
        const Result again = run(c, DeltaState::write, How::rule, n_threads);
        CHECK(again.out == all.out);
        CHECK(again.state == all.state);
        CHECK(run(c, DeltaState::write, How::state_only, n_threads).state == all.state);
    }
    for (const int64_t n : {1, 2, 63, 64, 65, 130}) {
        const Case part = first_tokens(c, n);
        CHECK(run(part, DeltaState::drop).out == front(all.out, 64 * 4 * n));
        CHECK(run(part, DeltaState::write).out == front(all.out, 64 * 4 * n));
        const Result each = run(part, DeltaState::each);
        CHECK(run(part, DeltaState::write).state == front(each.each, 64 * 64 * 4));
    }
}

TEST(a_state_goes_on_from_call_to_call) {
    const Case c = make_case(64, 2, 4, 12);
    const Result all = run(c, DeltaState::write);
    Case rest = c;
    rest.state = run(first_tokens(c, 5), DeltaState::write, How::state_only).state;
    rest.n = 7;
    rest.q.erase(rest.q.begin(), rest.q.begin() + 64 * 2 * 5);
    rest.k.erase(rest.k.begin(), rest.k.begin() + 64 * 2 * 5);
    rest.v.erase(rest.v.begin(), rest.v.begin() + 64 * 4 * 5);
    rest.g.erase(rest.g.begin(), rest.g.begin() + 4 * 5);
    rest.beta.erase(rest.beta.begin(), rest.beta.begin() + 4 * 5);
    const Result second = run(rest, DeltaState::write);
    CHECK(second.state == all.state);
    CHECK(second.out == std::vector<float>(all.out.begin() + 64 * 4 * 5, all.out.end()));
}
