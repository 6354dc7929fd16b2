#include "cpu/delta_net.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/simd.hpp"

namespace dflash::cpu {
namespace {

constexpr int64_t rows_at_once = 16; // of a state, that one thread takes
constexpr int64_t tokens_at_once = 64;

struct Gates {
    float decay[tokens_at_once];
    float beta[tokens_at_once];
};

/// Rows [row, row + n_rows) of one head's state go through tokens [first, end) in registers. They lie at `from`, and
/// are written to `to`.
template <int vectors, int n_rows>
void run_rows(const DeltaCall & c, const Gates & gates, int64_t head, int64_t sequence, int64_t row, int64_t first,
              int64_t end, const float * from, float * to) {
    const int64_t size = c.size;
    const int64_t head_k = head % c.n_head_k;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    Floats s[n_rows][vectors];
    for (int i = 0; i < n_rows; ++i) {
        for (int j = 0; j < vectors; ++j) {
            s[i][j] = load(from + i * size + j * lanes);
        }
    }
    for (int64_t token = first; token < end; ++token) {
        const float * k = c.k.at(head_k, token, sequence);
        const float * v = c.v.at(head, token, sequence) + row;
        const Floats decay = all(gates.decay[token - first]);
        Floats sums[n_rows] = {};
        for (int j = 0; j < vectors; ++j) {
            const Floats key = load(k + j * lanes);
            for (int i = 0; i < n_rows; ++i) {
                s[i][j] = s[i][j] * decay;
                sums[i] = multiply_add(s[i][j], key, sums[i]);
            }
        }
        Floats change[n_rows];
        for (int i = 0; i < n_rows; ++i) {
            change[i] = all((v[i] - sum_of(sums[i])) * gates.beta[token - first]);
        }
        for (int j = 0; j < vectors; ++j) {
            const Floats key = load(k + j * lanes);
            for (int i = 0; i < n_rows; ++i) {
                s[i][j] = multiply_add(change[i], key, s[i][j]);
            }
        }
        if (c.out != nullptr) {
            const float * q = c.q.at(head_k, token, sequence);
            float * out = c.out + ((sequence * c.n_tokens + token) * c.n_head + head) * size + row;
            Floats found[n_rows] = {};
            for (int j = 0; j < vectors; ++j) {
                const Floats query = load(q + j * lanes);
                for (int i = 0; i < n_rows; ++i) {
                    found[i] = multiply_add(s[i][j], query, found[i]);
                }
            }
            for (int i = 0; i < n_rows; ++i) {
                out[i] = sum_of(found[i]) * scale;
            }
        }
        if (c.each != nullptr) {
            float * state = c.each + ((c.n_tokens - 1 - token) * c.n_head + head) * size * size;
            for (int i = 0; i < n_rows; ++i) {
                for (int j = 0; j < vectors; ++j) {
                    store(state + (row + i) * size + j * lanes, s[i][j]);
                }
            }
        }
    }
    for (int i = 0; i < n_rows; ++i) {
        for (int j = 0; j < vectors; ++j) {
            store(to + i * size + j * lanes, s[i][j]);
        }
    }
}

template <int vectors> void run(const DeltaCall & c, int ith, int nth) {
    constexpr int n_rows = vectors <= 4 ? 4 : vectors <= 8 ? 2 : 1;
    const int64_t size = c.size;
    const int64_t parts = size / rows_at_once;
    float between[rows_at_once * vectors * lanes]; // where a state that is not kept waits for the next tokens
    for (int64_t unit = ith; unit < c.n_sequences * c.n_head * parts; unit += nth) {
        const int64_t begin = unit % parts * rows_at_once;
        const int64_t head = unit / parts % c.n_head;
        const int64_t sequence = unit / parts / c.n_head;
        const int64_t place = (head * size + begin) * size;
        const float * from = c.state + place;
        float * to = c.newest != nullptr ? c.newest + place : between;
        for (int64_t first = 0; first < c.n_tokens; first += tokens_at_once) {
            const int64_t end = std::min(c.n_tokens, first + tokens_at_once);
            Gates gates;
            for (int64_t token = first; token < end; ++token) {
                gates.decay[token - first] = std::exp(*c.g.at(head, token, sequence));
                gates.beta[token - first] = *c.beta.at(head, token, sequence);
            }
            for (int64_t row = 0; row < rows_at_once; row += n_rows) {
                run_rows<vectors, n_rows>(c, gates, head, sequence, begin + row, first, end, from + row * size,
                                          to + row * size);
            }
            from = to;
        }
    }
}

} // namespace

bool delta_net_takes(int64_t size) {
    return size % rows_at_once == 0 && size % lanes == 0 && (size & (size - 1)) == 0 && size <= 16 * lanes;
}

void delta_net(const DeltaCall & call, int ith, int nth) {
    switch (call.size / lanes) {
    case 1:
        return run<1>(call, ith, nth);
    case 2:
        return run<2>(call, ith, nth);
    case 4:
        return run<4>(call, ith, nth);
    case 8:
        return run<8>(call, ith, nth);
    default:
        return run<16>(call, ith, nth);
    }
}

} // namespace dflash::cpu
