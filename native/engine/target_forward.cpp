#include "engine/target_forward.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "ggmlx/tensors.hpp"

namespace dflash {
namespace {

constexpr size_t max_graphs = 32;

} // namespace

int32_t argmax_lowest(const float * values, int64_t n, int64_t row) {
    int64_t best = 0;
    bool nan = std::isnan(values[0]);
    for (int64_t i = 1; i < n; ++i) {
        nan = nan || std::isnan(values[i]);
        if (values[i] > values[best]) {
            best = i;
        }
    }
    check(!nan, Status::internal, "logits of row %lld are not a number", static_cast<long long>(row));
    return static_cast<int32_t>(best);
}

int64_t TargetForward::keys_for(int64_t end) const {
    return std::min(cache_.physical_capacity(), round_up(end, 256));
}

void TargetForward::check_ids(const int32_t * ids, int64_t n) const {
    const int32_t n_vocab = cache_.model().config().n_vocab;
    for (int64_t i = 0; i < n; ++i) {
        check(ids[i] >= 0 && ids[i] < n_vocab, Status::invalid, "token id %d at index %lld, want 0 to %d", ids[i],
              static_cast<long long>(i), n_vocab - 1);
    }
}

void TargetForward::check_room(int64_t n) const {
    check(!poisoned_, Status::poisoned, "a device error left this cache unusable; reset it");
    check(cache_.position() + n <= cache_.capacity(), Status::capacity,
          "%lld tokens at position %lld do not fit a context of %lld", static_cast<long long>(n),
          static_cast<long long>(cache_.position()), static_cast<long long>(cache_.capacity()));
}

TargetForward::Entry & TargetForward::entry(const TargetGraphShape & shape) {
    ++clock_;
    for (auto & e : entries_) {
        if (e->graph->shape == shape) {
            e->last_use = clock_;
            return *e;
        }
    }
    // The same graph for fewer keys will not be needed again soon.
    TargetGraphShape other = shape;
    for (auto it = entries_.begin(); it != entries_.end();) {
        other.n_kv = (*it)->graph->shape.n_kv;
        it = (*it)->graph->shape == other ? entries_.erase(it) : it + 1;
    }
    if (entries_.size() >= max_graphs) {
        entries_.erase(std::min_element(entries_.begin(), entries_.end(),
                                        [](const auto & a, const auto & b) { return a->last_use < b->last_use; }));
    }
    last_ = nullptr;
    auto e = std::make_unique<Entry>();
    e->graph = build_target_graph(cache_, shape);
    e->ints.resize(static_cast<size_t>(e->graph->ints->ne[0]));
    e->kv_rows.resize(static_cast<size_t>(shape.n_rows));
    e->last_use = clock_;
    entries_.push_back(std::move(e));
    return *entries_.back();
}

void TargetForward::run(Entry & e, int64_t base, const int32_t * ids, const float * hidden,
                        const std::vector<int64_t> & out_rows, const TreeLayout * tree) {
    TargetGraph & g = *e.graph;
    const TargetConfig & c = cache_.model().config();
    const int64_t n = g.shape.n_rows;
    const int64_t ring = std::max<int64_t>(cache_.feature_capacity(), 1);
    int32_t * at = e.ints.data();
    for (int64_t i = 0; i < n; ++i) {
        at[i] = static_cast<int32_t>(base + (tree != nullptr ? tree->depth[static_cast<size_t>(i)] : i));
        at[n + i] = static_cast<int32_t>((base + i) % ring);
        e.kv_rows[static_cast<size_t>(i)] = base + i;
    }
    at += 2 * n;
    for (const int64_t row : out_rows) {
        *at++ = static_cast<int32_t>(row);
    }
    if (g.has_host_ids) {
        std::copy(ids, ids + n, at);
    } else if (g.activations != nullptr) {
        e.activations.resize(static_cast<size_t>(n * c.n_embd));
        if (hidden != nullptr) {
            std::copy(hidden, hidden + n * c.n_embd, e.activations.begin());
        } else {
            cache_.model().embedder().embed(ids, n, e.activations.data());
        }
        g.graph->write(g.activations, e.activations.data(), 0, e.activations.size() * sizeof(float));
    }
    g.graph->write(g.ints, e.ints.data(), 0, e.ints.size() * sizeof(int32_t));
    g.graph->write(g.kv_rows, e.kv_rows.data(), 0, e.kv_rows.size() * sizeof(int64_t));
    if (tree != nullptr) {
        write_tree(e, base, *tree);
    } else if (g.mask) {
        g.mask->update(*g.graph, base);
    }
    g.graph->compute_async();
    last_ = &g;
}

ForwardResult TargetForward::forward(const ForwardRequest & q) {
    const TargetModel & model = cache_.model();
    const TargetConfig & c = model.config();
    check(q.n >= 1, Status::invalid, "%lld tokens, want at least 1", static_cast<long long>(q.n));
    check(q.chunk >= 1 && q.chunk <= 65536, Status::invalid, "chunk %d, want 1 to 65536", q.chunk);
    const int32_t begin = q.layer_begin < 0 ? cache_.layer_begin() : q.layer_begin;
    const int32_t end = q.layer_end < 0 ? cache_.layer_end() : q.layer_end;
    check(begin >= cache_.layer_begin() && begin < end && end <= cache_.layer_end(), Status::invalid,
          "layers [%d, %d), want a part of the cache's [%d, %d)", begin, end, cache_.layer_begin(), cache_.layer_end());
    check(q.hidden != nullptr || begin == 0, Status::invalid, "layers from %d need hidden states as input", begin);
    check((q.hidden != nullptr) != (q.ids != nullptr), Status::invalid, "want either token ids or hidden states");
    if (q.ids != nullptr) {
        check_ids(q.ids, q.n);
    }
    for (size_t i = 0; i < q.logit_rows.size(); ++i) {
        check(q.logit_rows[i] >= 0 && q.logit_rows[i] < q.n && (i == 0 || q.logit_rows[i] > q.logit_rows[i - 1]),
              Status::invalid, "logit row %lld, want strictly increasing rows in [0, %lld)",
              static_cast<long long>(q.logit_rows[i]), static_cast<long long>(q.n));
    }
    check(q.logit_rows.empty() || (model.has_output() && end == c.n_layer), Status::invalid,
          "logits need the output head and the last layer");
    for (const int32_t layer : q.hidden_layers) {
        check(layer >= begin && layer < end, Status::invalid, "hidden layer %d, want %d to %d", layer, begin, end - 1);
    }
    check_room(q.n);
    std::vector<int32_t> inspected = q.hidden_layers;
    std::sort(inspected.begin(), inspected.end());
    inspected.erase(std::unique(inspected.begin(), inspected.end()), inspected.end());
    check(inspected.size() == q.hidden_layers.size(), Status::invalid, "a hidden layer is named twice");

    ForwardResult result;
    const size_t n_vocab = static_cast<size_t>(c.n_vocab);
    const size_t width = static_cast<size_t>(c.n_embd);
    result.logits.resize(q.logit_rows.size() * n_vocab);
    const size_t n_hidden = inspected.size() + (q.want_hidden ? 1 : 0);
    result.hidden.resize(n_hidden * static_cast<size_t>(q.n) * width);

    const auto guard = model.device()->lock();
    forget_outcome();
    int64_t chunk = q.chunk;
    if (cache_.feature_capacity() > 0) {
        chunk = std::min(chunk, cache_.feature_capacity());
    }
    const int64_t start = cache_.position();
    size_t next_row = 0;
    for (int64_t done = 0; done < q.n; done += chunk) {
        if (q.cancel != nullptr) {
            q.cancel->check_not_raised();
        }
        if (q.progress && !q.progress(done, q.n)) {
            fail(Status::cancelled, "cancelled by the caller");
        }
        const int64_t n = std::min(chunk, q.n - done);
        std::vector<int64_t> rows;
        const size_t first_row = next_row;
        while (next_row < q.logit_rows.size() && q.logit_rows[next_row] < done + n) {
            rows.push_back(q.logit_rows[next_row++] - done);
        }
        const int64_t base = start + done;
        TargetGraphShape shape;
        shape.n_rows = static_cast<int32_t>(n);
        shape.n_out = static_cast<int32_t>(rows.size());
        shape.n_kv = keys_for(base + n);
        shape.from_hidden = q.hidden != nullptr;
        shape.want_hidden = q.want_hidden;
        shape.layer_begin = begin;
        shape.layer_end = end;
        shape.hidden_layers = inspected;
        Entry & e = entry(shape);
        TargetGraph & g = *e.graph;
        try {
            run(e, base, q.ids != nullptr ? q.ids + done : nullptr,
                q.hidden != nullptr ? q.hidden + static_cast<size_t>(done) * width : nullptr, rows);
            if (!rows.empty()) {
                g.graph->read(g.logits, result.logits.data() + first_row * n_vocab, 0,
                              rows.size() * n_vocab * sizeof(float));
            }
            for (size_t i = 0; i < n_hidden; ++i) {
                const ggml_tensor * from = i < g.hidden.size() ? g.hidden[i] : g.hidden_out;
                float * to = result.hidden.data() + (i * static_cast<size_t>(q.n) + static_cast<size_t>(done)) * width;
                g.graph->read(from, to, 0, static_cast<size_t>(n) * width * sizeof(float));
            }
        } catch (...) {
            poisoned_ = true; // the recurrent state may or may not have moved
            throw;
        }
        cache_.note_rows_written(base, n);
        cache_.last_logits.clear();
        if (end == cache_.layer_end()) {
            cache_.set_position(base + n);
        }
        if (!rows.empty() && rows.back() == n - 1) {
            const auto row_end = result.logits.begin() + static_cast<std::ptrdiff_t>(next_row * n_vocab);
            cache_.last_logits.assign(row_end - static_cast<std::ptrdiff_t>(n_vocab), row_end);
        }
        if (q.after_chunk) {
            q.after_chunk(base, n);
        }
    }
    model.device()->synchronize();
    if (q.progress) {
        q.progress(q.n, q.n);
    }
    return result;
}

VerifyOutcome TargetForward::verify(const int32_t * ids, int32_t n, DeviceIds device_ids) {
    const TargetModel & model = cache_.model();
    check(cache_.can_verify(), Status::invalid, "this cache is for prefill only; migrate it first");
    check(n >= 1 && n <= cache_.options().max_verify, Status::invalid, "%d verify rows, want 1 to max_verify %d", n,
          cache_.options().max_verify);
    check(model.has_output() && cache_.layer_begin() == 0 && cache_.layer_end() == model.config().n_layer,
          Status::invalid, "verify needs all layers and the output head");
    if (ids != nullptr) {
        check_ids(ids, n);
    }
    check_room(n);
    const auto guard = model.device()->lock();
    const int64_t base = cache_.position();
    TargetGraphShape shape;
    shape.n_rows = n;
    shape.n_out = n;
    shape.n_kv = keys_for(base + n);
    shape.verify = true;
    shape.layer_begin = 0;
    shape.layer_end = model.config().n_layer;
    shape.device_ids = device_ids.tensor;
    shape.device_ids_serial = device_ids.serial;
    Entry & e = entry(shape);
    for (int32_t rows = 1; e.commits.empty() || e.commits.back()->n_rows < n; rows *= 2) {
        e.commits.push_back(build_commit_graph(cache_, *e.graph, std::min(rows, n)));
    }
    std::vector<int64_t> rows(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) {
        rows[static_cast<size_t>(i)] = i;
    }
    forget_outcome();
    run(e, base, ids, nullptr, rows);
    cache_.note_rows_written(base, n);
    return {serial_, base, n, e.graph.get(), false, nullptr};
}

VerifyOutcome TargetForward::advance(int32_t id) {
    const TargetModel & model = cache_.model();
    check(model.has_output() && cache_.layer_begin() == 0 && cache_.layer_end() == model.config().n_layer,
          Status::invalid, "decoding needs all layers and the output head");
    check_ids(&id, 1);
    check_room(1);
    const auto guard = model.device()->lock();
    const int64_t base = cache_.position();
    TargetGraphShape shape;
    shape.n_rows = 1;
    shape.n_out = 1;
    shape.n_kv = keys_for(base + 1);
    shape.layer_begin = 0;
    shape.layer_end = model.config().n_layer;
    Entry & e = entry(shape);
    forget_outcome();
    try {
        run(e, base, &id, nullptr, {0});
    } catch (...) {
        poisoned_ = true;
        throw;
    }
    cache_.note_rows_written(base, 1);
    cache_.set_position(base + 1);
    cache_.last_logits.clear();
    return {serial_, base, 1, e.graph.get(), true, nullptr};
}

void TargetForward::check_outcome(const VerifyOutcome & outcome) const {
    check(is_current(outcome), Status::invalid, "this verify outcome is stale: the cache has moved on");
}

std::vector<int32_t> TargetForward::verify_argmax(const VerifyOutcome & outcome) {
    check_outcome(outcome);
    const auto guard = cache_.model().device()->lock();
    std::vector<int32_t> ids(static_cast<size_t>(outcome.n_rows));
    TargetGraph & g = *outcome.graph;
    if (g.argmax == nullptr) {
        for (int32_t i = 0; i < outcome.n_rows; ++i) {
            ids[static_cast<size_t>(i)] = argmax_lowest(verify_logits(outcome, i), cache_.model().config().n_vocab, i);
        }
        return ids;
    }
    g.graph->read(g.argmax, ids.data(), 0, ids.size() * sizeof(int32_t));
    for (size_t i = 0; i < ids.size(); ++i) {
        check(ids[i] >= 0 && ids[i] < cache_.model().config().n_vocab, Status::internal,
              "logits of row %zu are not a number", i);
    }
    return ids;
}

const float * TargetForward::verify_logits(const VerifyOutcome & outcome, int32_t row) {
    check_outcome(outcome);
    check(row >= 0 && row < outcome.n_rows, Status::invalid, "row %d, want 0 to %d", row, outcome.n_rows - 1);
    const auto guard = cache_.model().device()->lock();
    const size_t n_vocab = static_cast<size_t>(cache_.model().config().n_vocab);
    TargetGraph & g = *outcome.graph;
    if (const void * data = host_data(g.logits)) {
        cache_.model().device()->synchronize();
        return static_cast<const float *>(data) + static_cast<size_t>(row) * n_vocab;
    }
    row_buffer_.resize(n_vocab);
    g.graph->read(g.logits, row_buffer_.data(), static_cast<size_t>(row) * n_vocab * sizeof(float),
                  n_vocab * sizeof(float));
    return row_buffer_.data();
}

std::vector<float> TargetForward::verify_state(const VerifyOutcome & outcome, int32_t layer, int32_t row) {
    check_outcome(outcome);
    check(row >= 0 && row < outcome.n_rows, Status::invalid, "row %d, want 0 to %d", row, outcome.n_rows - 1);
    for (const DeltaNetCapture & d : outcome.graph->captures) {
        if (d.layer == layer) {
            check(d.states != nullptr, Status::invalid,
                  "states of single rows were not kept: open the cache with keep_states, and verify a chain");
            const size_t n = static_cast<size_t>(d.states->ne[0] * d.states->ne[1] * d.states->ne[2]);
            std::vector<float> out(n);
            const size_t slot = static_cast<size_t>(outcome.n_rows - 1 - row); // newest first
            const auto guard = cache_.model().device()->lock();
            outcome.graph->graph->read(d.states, out.data(), slot * n * sizeof(float), n * sizeof(float));
            return out;
        }
    }
    fail(Status::invalid, "layer %d has no recurrent state", layer);
}

std::vector<float> TargetForward::verify_conv_input(const VerifyOutcome & outcome, int32_t layer) {
    check_outcome(outcome);
    for (const DeltaNetCapture & d : outcome.graph->captures) {
        if (d.layer == layer) {
            std::vector<float> out(static_cast<size_t>(ggml_nelements(d.conv_input)));
            const auto guard = cache_.model().device()->lock();
            outcome.graph->graph->read(d.conv_input, out.data(), 0, out.size() * sizeof(float));
            return out;
        }
    }
    fail(Status::invalid, "layer %d has no convolution state", layer);
}

void TargetForward::device_commit(const VerifyOutcome & outcome, int32_t n) {
    for (auto & e : entries_) {
        if (e->graph.get() != outcome.graph) {
            continue;
        }
        CommitGraph & commit = **std::find_if(e->commits.begin(), e->commits.end(),
                                              [&](const auto & graph) { return graph->n_rows >= n; });
        std::vector<float> keep(static_cast<size_t>(commit.n_rows), 0.0f);
        std::fill(keep.begin(), keep.begin() + n, 1.0f);
        std::vector<int32_t> columns(static_cast<size_t>(commit.conv_rows->ne[0]));
        for (size_t i = 0; i < columns.size(); ++i) {
            columns[i] = n + static_cast<int32_t>(i);
        }
        commit.graph->write(commit.keep, keep.data(), 0, keep.size() * sizeof(float));
        commit.graph->write(commit.conv_rows, columns.data(), 0, columns.size() * sizeof(int32_t));
        commit.graph->compute_async();
        return;
    }
    fail(Status::internal, "the graph of a verify outcome is gone");
}

void TargetForward::commit_async(const VerifyOutcome & outcome, int32_t n) {
    check_outcome(outcome);
    check(n >= 0 && n <= outcome.n_rows, Status::invalid, "commit of %d rows, want 0 to %d", n, outcome.n_rows);
    std::vector<int32_t> path(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) {
        path[static_cast<size_t>(i)] = i;
    }
    commit_path_async(outcome, path);
}

void TargetForward::commit_rows(const VerifyOutcome & outcome, const std::vector<int32_t> & path) {
    check(!outcome.committed, Status::invalid, "this outcome is committed already");
    const auto n = static_cast<int32_t>(path.size());
    const auto guard = cache_.model().device()->lock();
    if (n > 0) {
        std::vector<float> logits;
        if (const void * data = host_data(outcome.graph->logits)) {
            const size_t n_vocab = static_cast<size_t>(cache_.model().config().n_vocab);
            const float * row = static_cast<const float *>(data) + static_cast<size_t>(path.back()) * n_vocab;
            cache_.model().device()->synchronize();
            logits.assign(row, row + n_vocab);
        }
        try {
            if (outcome.graph->shape.tree_levels > 0) {
                device_commit_path(outcome, path);
            } else {
                device_commit(outcome, n);
            }
        } catch (...) {
            poisoned_ = true;
            throw;
        }
        cache_.set_position(outcome.base + n);
        cache_.last_logits = std::move(logits);
    }
    forget_outcome();
}

template <class Body> void TargetForward::restore_with(Body && body) {
    try {
        body();
    } catch (const Error & error) {
        poisoned_ = poisoned_ || error.status() == Status::poisoned;
        throw;
    }
    forget_outcome();
    poisoned_ = false;
}

void TargetForward::restore(const PrefixSnapshot & snapshot, DraftContext * context) {
    restore_with([&] { restore_target_cache(snapshot, cache_, context); });
}

void TargetForward::restore_chain(const PrefixSnapshot * thick, const std::vector<const PrefixSnapshot *> & thins) {
    restore_with([&] { restore_target_cache_chain(thick, thins, cache_); });
}

void TargetForward::commit(const VerifyOutcome & outcome, int32_t n) {
    commit_async(outcome, n);
    cache_.model().device()->synchronize();
}

std::vector<int32_t> TargetForward::moe_selected(int32_t layer) {
    check(last_ != nullptr, Status::invalid, "no forward has run since the last graph change");
    const int32_t at = layer - last_->shape.layer_begin;
    check(at >= 0 && at < static_cast<int32_t>(last_->moe_selected.size()), Status::invalid, "layer %d, want %d to %d",
          layer, last_->shape.layer_begin, last_->shape.layer_end - 1);
    const ggml_tensor * t = last_->moe_selected[static_cast<size_t>(at)];
    if (t == nullptr) {
        return {};
    }
    std::vector<int32_t> out(static_cast<size_t>(ggml_nelements(t)));
    const auto guard = cache_.model().device()->lock();
    last_->graph->read(t, out.data(), 0, out.size() * sizeof(int32_t));
    return out;
}

uint64_t TargetForward::graph_bytes() const {
    uint64_t n = 0;
    for (const auto & e : entries_) {
        n += e->graph->graph->bytes();
        for (const auto & commit : e->commits) {
            n += commit->graph->bytes();
        }
    }
    return n;
}

} // namespace dflash
