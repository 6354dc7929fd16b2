#include "engine/draft_forward.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.hpp"

namespace dflash {
namespace {

constexpr int64_t append_chunk = 512;
constexpr size_t max_append_graphs = 32;
constexpr size_t max_propose_graphs = 8;

/// Rows that a graph is built for: exact up to one block, then powers of two, so that few graphs serve every n.
int32_t padded_rows(int64_t n, int64_t block) {
    if (n <= block) {
        return static_cast<int32_t>(n);
    }
    int64_t rows = 32;
    while (rows < n) {
        rows *= 2;
    }
    return static_cast<int32_t>(rows);
}

} // namespace

DraftForward::DraftForward(DraftContext & context) : context_(context) {
    const DraftConfig & c = context.model().config();
    ids_ = std::make_unique<TensorGroup>(context.model().device(), 2);
    block_ids_ = ids_->add(GGML_TYPE_I32, "block_ids", c.block_size);
    verify_ids_ = ids_->add(GGML_TYPE_I32, "verify_ids", c.n_proposals() + 1);
    ids_->allocate("drafter block");
    block_.assign(static_cast<size_t>(c.block_size), c.mask_token_id);
    positions_.resize(static_cast<size_t>(c.block_size));
    const auto guard = context.model().device()->lock();
    tensor_write(block_ids_, block_.data(), 0, block_.size() * sizeof(int32_t));
}

DraftAppendGraph & DraftForward::append_graph(int32_t n_rows, ggml_tensor * ring, uint64_t serial) {
    const auto it = std::find_if(appends_.begin(), appends_.end(), [&](const auto & g) {
        return g->n_rows == n_rows && g->ring == ring && g->ring_serial == serial;
    });
    if (it != appends_.end()) {
        return **it;
    }
    if (appends_.size() >= max_append_graphs) {
        appends_.erase(appends_.begin());
    }
    appends_.push_back(build_draft_append_graph(context_, n_rows, ring));
    appends_.back()->ring_serial = serial;
    return *appends_.back();
}

void DraftForward::run_append(ggml_tensor * ring, uint64_t serial, int64_t capacity, const float * features,
                              int64_t base, int64_t n, int64_t end) {
    const DraftConfig & c = context_.model().config();
    DraftAppendGraph & g = append_graph(padded_rows(n, c.block_size), ring, serial);
    const int64_t rows = g.n_rows;
    ints_.resize(static_cast<size_t>(rows * (2 + c.n_layer)));
    for (int64_t i = 0; i < rows; ++i) {
        const bool used = i < n;
        const int64_t position = base + (used ? i : 0);
        ints_[static_cast<size_t>(i)] = static_cast<int32_t>(position);
        ints_[static_cast<size_t>(rows + i)] = static_cast<int32_t>(ring != nullptr ? position % capacity : 0);
        for (int32_t l = 0; l < c.n_layer; ++l) {
            const int64_t row = used ? context_.ring_row(l, position, end) : context_.trash_row();
            ints_[static_cast<size_t>((2 + l) * rows + i)] = static_cast<int32_t>(row);
        }
    }
    if (features != nullptr) {
        const size_t row_bytes = static_cast<size_t>(g.features->nb[1]);
        g.graph->write(g.features, features, 0, static_cast<size_t>(n) * row_bytes);
    }
    g.graph->write(g.ints, ints_.data(), 0, ints_.size() * sizeof(int32_t));
    g.graph->compute_async();
}

void DraftForward::append_all(ggml_tensor * ring, uint64_t serial, int64_t capacity, const float * features,
                              int64_t base, int64_t n) {
    context_.check_append(base, n);
    if (n == 0) {
        return;
    }
    const DraftConfig & c = context_.model().config();
    const auto guard = context_.model().device()->lock();
    proposed_ = false;
    try {
        for (int64_t done = 0; done < n; done += append_chunk) {
            const int64_t rows = std::min(append_chunk, n - done);
            const float * from =
                features != nullptr ? features + done * static_cast<int64_t>(c.n_taps()) * c.n_embd : nullptr;
            run_append(ring, serial, capacity, from, base + done, rows, base + n);
        }
        if (features != nullptr) {
            context_.model().device()->synchronize(); // the caller's memory is free again on return
        }
    } catch (...) {
        context_.invalidate(base);
        throw;
    }
    context_.note_appended(base, n);
}

void DraftForward::append_ring(ggml_tensor * ring, uint64_t serial, int64_t capacity, int64_t base, int64_t n) {
    const DraftConfig & c = context_.model().config();
    check(ring != nullptr && capacity >= 1 && capacity <= ring->ne[1] &&
              ring->ne[0] == static_cast<int64_t>(c.n_taps()) * c.n_embd,
          Status::mismatch, "the feature ring does not hold rows of %d layers of %d", c.n_taps(), c.n_embd);
    check(n <= capacity, Status::capacity, "%lld feature rows of a ring of %lld", static_cast<long long>(n),
          static_cast<long long>(capacity));
    append_all(ring, serial, capacity, nullptr, base, n);
}

void DraftForward::append(const TargetCache & cache, int64_t base, int64_t n) {
    context_.check_append(base, n);
    check(context_.model().device() == cache.model().device(), Status::mismatch,
          "the drafter is on another device than the features; use a feature mirror");
    check(cache.options().capture_layers == context_.model().config().target_layer_ids, Status::mismatch,
          "the cache captures other layers than the drafter reads");
    const PositionRange have = cache.feature_range();
    check(n == 0 || have.contains(base, base + n), Status::invalid,
          "features of positions [%lld, %lld) are not there, the ring holds [%lld, %lld)", static_cast<long long>(base),
          static_cast<long long>(base + n), static_cast<long long>(have.begin), static_cast<long long>(have.end));
    append_ring(cache.target_feat(), cache.memory_serial(), cache.feature_capacity(), base, n);
}

void DraftForward::append_host(const float * features, int64_t base, int64_t n) {
    check(features != nullptr || n == 0, Status::invalid, "no features given");
    append_all(nullptr, 0, 0, features, base, n);
}

DraftProposeGraph & DraftForward::propose_graph(int32_t n_out, int32_t n_top) {
    const std::vector<int64_t> keys = draft_keys(context_);
    const auto it = std::find_if(proposes_.begin(), proposes_.end(),
                                 [&](const auto & g) { return g->n_out == n_out && g->n_top == n_top; });
    if (it != proposes_.end() && (*it)->n_kv == keys) {
        return **it;
    }
    propose_ = nullptr;
    if (it != proposes_.end()) {
        proposes_.erase(it);
    } else if (proposes_.size() >= max_propose_graphs) {
        proposes_.erase(proposes_.begin());
    }
    proposes_.push_back(build_draft_propose_graph(context_, n_out, n_top, block_ids_, verify_ids_));
    return *proposes_.back();
}

void DraftForward::propose(int32_t anchor, int32_t n_wanted, int32_t n_top) {
    const DraftModel & model = context_.model();
    const DraftConfig & c = model.config();
    const int32_t n_vocab = model.target()->config().n_vocab;
    check(anchor >= 0 && anchor < n_vocab, Status::invalid, "anchor %d, want 0 to %d", anchor, n_vocab - 1);
    check(n_wanted != 0 && n_wanted <= c.n_proposals(), Status::invalid, "%d proposals, want 1 to %d", n_wanted,
          c.n_proposals());
    check(n_top >= 0, Status::invalid, "%d candidates of a slot, want >= 0", n_top);
    const auto guard = model.device()->lock();
    proposed_ = false;
    propose_ = &propose_graph(n_wanted < 0 ? c.n_proposals() : n_wanted, n_top);
    Graph & graph = *propose_->graph;
    for (size_t i = 0; i < positions_.size(); ++i) {
        positions_[i] = static_cast<int32_t>(context_.cursor() + static_cast<int64_t>(i));
    }
    block_[0] = anchor;
    if (propose_->embeddings != nullptr) {
        embeddings_.resize(block_.size() * static_cast<size_t>(c.n_embd));
        model.target()->embedder().embed(block_.data(), static_cast<int64_t>(block_.size()), embeddings_.data());
        graph.write(propose_->embeddings, embeddings_.data(), 0, embeddings_.size() * sizeof(float));
    }
    graph.write(block_ids_, block_.data(), 0, sizeof(int32_t));
    graph.write(propose_->positions, positions_.data(), 0, positions_.size() * sizeof(int32_t));
    for (const auto & mask : propose_->masks) {
        mask->update(graph);
    }
    graph.compute_async();
    proposed_ = true;
}

std::vector<int32_t> DraftForward::proposals() {
    check(has_proposals(), Status::invalid, "nothing was proposed since the context changed");
    const auto guard = context_.model().device()->lock();
    std::vector<int32_t> ids(static_cast<size_t>(propose_->n_out));
    propose_->graph->read(propose_->ids, ids.data(), 0, ids.size() * sizeof(int32_t));
    for (size_t i = 0; i < ids.size(); ++i) {
        check(ids[i] >= 0 && ids[i] < context_.model().target()->config().n_vocab, Status::internal,
              "proposal %zu is %d: the drafter's logits are not numbers", i, ids[i]);
    }
    if (propose_->chain.chances != nullptr) { // an argmax over broken numbers is a token all the same
        n_worth_verifying(chances(), 0.0f);
    }
    return ids;
}

std::vector<SlotCandidates> DraftForward::candidates() {
    check(has_proposals() && propose_->top_ids != nullptr, Status::invalid,
          "no candidates were asked for since the context changed");
    const auto guard = context_.model().device()->lock();
    const auto n_slots = static_cast<size_t>(propose_->n_out);
    const auto n_top = static_cast<size_t>(ggml_nelements(propose_->top_ids)) / n_slots;
    std::vector<int32_t> ids(n_slots * n_top);
    std::vector<float> values(2 * n_slots * n_top); // by slot: logits, probabilities
    propose_->graph->read(propose_->top_ids, ids.data(), 0, ids.size() * sizeof(int32_t));
    propose_->graph->read(propose_->top_values, values.data(), 0, values.size() * sizeof(float));
    std::vector<SlotCandidates> slots;
    for (size_t i = 0; i < n_slots; ++i) {
        const int32_t * slot_ids = ids.data() + i * n_top;
        const float * logits = values.data() + 2 * i * n_top;
        for (size_t j = 0; j < n_top; ++j) {
            check(slot_ids[j] >= 0 && slot_ids[j] < context_.model().target()->config().n_vocab, Status::internal,
                  "candidate %zu of slot %zu is %d: the drafter's logits are not numbers", j, i, slot_ids[j]);
        }
        // The best one's probability is at least 1 / vocabulary: its logarithm is exact enough for all of them.
        const auto best = static_cast<size_t>(std::max_element(logits, logits + n_top) - logits);
        const float log_normaliser = logits[best] - std::log(logits[n_top + best]);
        check(std::isfinite(log_normaliser), Status::internal, "the drafter's logits of slot %zu are not numbers", i);
        slots.push_back(sorted_candidates(slot_ids, logits, static_cast<int32_t>(n_top), log_normaliser));
    }
    return slots;
}

DraftTree DraftForward::propose_tree(int32_t anchor, int32_t n_nodes) {
    check(n_nodes >= 1 && n_nodes <= max_tree_nodes, Status::invalid, "a tree of %d nodes, want 1 to %d", n_nodes,
          max_tree_nodes);
    const int32_t n_slots = context_.model().config().n_proposals();
    propose(anchor, n_slots, tree_candidates);
    return build_draft_tree(anchor, choices(), tree_limits(n_nodes, n_slots));
}

std::vector<SlotChoices> DraftForward::choices() {
    if (!context_.model().config().is_chained()) {
        std::vector<SlotChoices> slots;
        for (SlotCandidates & slot : candidates()) {
            slots.push_back({std::move(slot)});
        }
        return slots;
    }
    ChainScores scores;
    scores.chain = proposals();
    if (context_.model().config().has_confidence) {
        scores.confidences = chances();
    }
    check(propose_->chain.top_ids != nullptr, Status::invalid,
          "no candidates were asked for since the context changed");
    const auto guard = context_.model().device()->lock();
    const ChainResult & chain = propose_->chain;
    const auto read = [&](ggml_tensor * tensor, auto & values) {
        values.resize(tensor != nullptr ? static_cast<size_t>(ggml_nelements(tensor)) : 0);
        if (tensor != nullptr) {
            propose_->graph->read(tensor, values.data(), 0, values.size() * sizeof(values[0]));
        }
    };
    scores.n_slots = propose_->n_out;
    scores.n_candidates = chain.n_top;
    std::vector<float> top_chance;
    read(chain.top_ids, scores.tokens);
    read(chain.first, scores.first);
    read(chain.pairs, scores.pairs);
    read(chain.top_chance, top_chance);
    for (const int32_t token : scores.tokens) {
        check_is_token(token, "candidate");
    }
    for (auto it = top_chance.begin(); it != top_chance.end(); it += scores.n_candidates) {
        scores.shares.push_back(std::accumulate(it, it + scores.n_candidates, 0.0f));
    }
    return chained_choices(scores);
}

void DraftForward::check_is_token(int32_t id, const char * what) const {
    check(id >= 0 && id < context_.model().target()->config().n_vocab, Status::internal,
          "a %s is %d: the drafter's logits are not numbers", what, id);
}

std::vector<float> DraftForward::chances() {
    check(has_proposals(), Status::invalid, "nothing was proposed since the context changed");
    check(propose_->chain.chances != nullptr, Status::unsupported,
          "this drafter has neither a confidence head nor a selector: it does not say what its proposals are worth");
    const auto guard = context_.model().device()->lock();
    std::vector<float> out(static_cast<size_t>(propose_->n_out));
    propose_->graph->read(propose_->chain.chances, out.data(), 0, out.size() * sizeof(float));
    return out;
}

std::vector<float> DraftForward::logits() {
    check(has_proposals(), Status::invalid, "nothing was proposed since the context changed");
    const auto guard = context_.model().device()->lock();
    std::vector<float> out(static_cast<size_t>(ggml_nelements(propose_->logits)));
    propose_->graph->read(propose_->logits, out.data(), 0, out.size() * sizeof(float));
    return out;
}

std::vector<float> DraftForward::hidden() {
    check(has_proposals(), Status::invalid, "nothing was proposed since the context changed");
    const auto guard = context_.model().device()->lock();
    std::vector<float> out(static_cast<size_t>(ggml_nelements(propose_->hidden)));
    propose_->graph->read(propose_->hidden, out.data(), 0, out.size() * sizeof(float));
    return out;
}

uint64_t DraftForward::graph_bytes() const {
    uint64_t n = 0;
    for (const auto & g : proposes_) {
        n += g->graph->bytes();
    }
    for (const auto & g : appends_) {
        n += g->graph->bytes();
    }
    return n;
}

} // namespace dflash
