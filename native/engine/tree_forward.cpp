#include <algorithm>

#include "base/error.hpp"
#include "engine/target_forward.hpp"

// The part of TargetForward that deals with trees.
namespace dflash {
namespace {

/// Few sizes serve every tree: steps of at most a half.
int32_t rounded_size(int32_t n) {
    for (const int32_t size : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48}) {
        if (n <= size) {
            return size;
        }
    }
    return std::max(n, max_tree_nodes + 1);
}

} // namespace

VerifyOutcome TargetForward::verify_tree(const int32_t * ids, const int32_t * parents, int32_t n, TreeSize size) {
    const TargetModel & model = cache_.model();
    check(n >= 1 && n <= cache_.options().max_verify, Status::invalid, "a tree of %d rows, want 1 to max_verify %d", n,
          cache_.options().max_verify);
    auto layout = std::make_shared<const TreeLayout>(lay_out_tree(parents, n));
    if (layout->is_chain) {
        VerifyOutcome outcome = verify(ids, n);
        outcome.tree = std::move(layout);
        return outcome;
    }
    check(cache_.can_verify(), Status::invalid, "this cache is for prefill only; migrate it first");
    check(model.has_output() && cache_.layer_begin() == 0 && cache_.layer_end() == model.config().n_layer,
          Status::invalid, "verify needs all layers and the output head");
    check_ids(ids, n);
    check_room(n);
    const auto guard = model.device()->lock();
    const int64_t base = cache_.position();
    const int32_t n_paths = static_cast<int32_t>(layout->paths.size());
    if (!size.holds(layout->n_levels, n_paths)) {
        size = {rounded_size(layout->n_levels), rounded_size(n_paths)};
    }
    Entry & e = tree_entry(n, size);
    std::vector<int64_t> rows(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) {
        rows[static_cast<size_t>(i)] = i;
    }
    forget_outcome();
    run(e, base, ids, nullptr, rows, layout.get());
    cache_.note_rows_written(base, n);
    return {serial_, base, n, e.graph.get(), false, std::move(layout)};
}

TargetForward::Entry & TargetForward::tree_entry(int32_t n, TreeSize size) {
    TargetGraphShape shape;
    shape.n_rows = n;
    shape.n_out = n;
    shape.n_kv = keys_for(cache_.position() + n);
    shape.verify = true;
    shape.layer_begin = 0;
    shape.layer_end = cache_.model().config().n_layer;
    shape.tree_levels = size.n_levels;
    shape.tree_paths = size.n_paths;
    Entry & e = entry(shape);
    if (!e.tree_commit) {
        e.tree_commit = build_tree_commit_graph(cache_, *e.graph);
    }
    return e;
}

void TargetForward::prepare_tree(int32_t n, const std::vector<TreeSize> & sizes) {
    check_room(n);
    const auto guard = cache_.model().device()->lock();
    for (const TreeSize & size : sizes) {
        tree_entry(n, size);
    }
}

void TargetForward::write_tree(Entry & e, int64_t base, const TreeLayout & layout) {
    TargetGraph & g = *e.graph;
    const int32_t width = cache_.model().config().ssm_d_conv;
    const int32_t n = g.shape.n_rows;
    const size_t levels = static_cast<size_t>(g.shape.tree_levels);
    std::vector<int32_t> & ints = e.tree_ints;
    ints.clear();
    for (int32_t i = 0; i < n; ++i) {
        // Column width - 1 + i of the window is row i, those before column width - 1 are the state's.
        int32_t node = i;
        const size_t at = ints.size();
        ints.resize(at + static_cast<size_t>(width));
        int32_t before = 0;
        for (int32_t j = width - 1; j >= 0; --j) {
            ints[at + static_cast<size_t>(j)] = width - 1 + (node >= 0 ? node : --before);
            node = node >= 0 ? layout.parents[static_cast<size_t>(node)] : node;
        }
    }
    const size_t first_path = ints.size();
    ints.resize(first_path + levels * static_cast<size_t>(g.shape.tree_paths), 0);
    for (size_t p = 0; p < layout.paths.size(); ++p) {
        std::copy(layout.paths[p].begin(), layout.paths[p].end(),
                  ints.begin() + static_cast<std::ptrdiff_t>(first_path + p * levels));
    }
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        ints.push_back(layout.path_of[i] * static_cast<int32_t>(levels) + layout.depth[i]);
    }
    g.graph->write(g.tree_ints, ints.data(), 0, ints.size() * sizeof(int32_t));
    if (g.mask) {
        g.mask->update_tree(*g.graph, base, layout.parents, layout.depth);
    }
}

void TargetForward::device_commit_path(const VerifyOutcome & outcome, const std::vector<int32_t> & path) {
    const auto it =
        std::find_if(entries_.begin(), entries_.end(), [&](const auto & e) { return e->graph.get() == outcome.graph; });
    check(it != entries_.end() && (*it)->tree_commit != nullptr, Status::internal,
          "the graph of a verify outcome is gone");
    TreeCommitGraph & commit = *(*it)->tree_commit;
    const auto levels = static_cast<size_t>(commit.n_levels);
    const int32_t history = cache_.model().config().ssm_d_conv - 1;
    const int64_t ring = std::max<int64_t>(cache_.feature_capacity(), 1);
    const auto n = static_cast<int32_t>(path.size());
    std::vector<float> keep(levels, 0.0f);
    std::vector<int32_t> nodes(levels, 0);
    std::vector<int64_t> depths(levels, 0);
    for (size_t i = 0; i < path.size(); ++i) {
        keep[i] = 1.0f;
        nodes[i] = path[i];
        depths[i] = static_cast<int64_t>(i);
    }
    std::vector<int32_t> ints = nodes;
    for (int32_t j = n - history; j < n; ++j) {
        ints.push_back(history + (j >= 0 ? path[static_cast<size_t>(j)] : j));
    }
    for (const int32_t node : nodes) {
        ints.push_back(static_cast<int32_t>(outcome.base) + node);
    }
    for (const int32_t node : nodes) {
        ints.push_back(static_cast<int32_t>((outcome.base + node) % ring));
    }
    std::vector<int64_t> rows;
    for (const int64_t depth : depths) {
        rows.push_back(outcome.base + depth);
    }
    for (const int64_t depth : depths) {
        rows.push_back((outcome.base + depth) % ring);
    }
    commit.graph->write(commit.keep, keep.data(), 0, keep.size() * sizeof(float));
    commit.graph->write(commit.ints, ints.data(), 0, ints.size() * sizeof(int32_t));
    commit.graph->write(commit.row_ints, rows.data(), 0, rows.size() * sizeof(int64_t));
    commit.graph->compute_async();
}

void TargetForward::commit_path_async(const VerifyOutcome & outcome, const std::vector<int32_t> & path) {
    check_outcome(outcome);
    if (outcome.tree == nullptr) {
        for (size_t i = 0; i < path.size(); ++i) {
            check(path[i] == static_cast<int32_t>(i), Status::invalid, "path[%zu] is row %d, a chain has row %zu there",
                  i, path[i], i);
        }
    } else {
        check_tree_path(outcome.tree->parents, path);
    }
    commit_rows(outcome, path);
}

void TargetForward::commit_path(const VerifyOutcome & outcome, const std::vector<int32_t> & path) {
    commit_path_async(outcome, path);
    cache_.model().device()->synchronize();
}

} // namespace dflash
