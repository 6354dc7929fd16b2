#include "graph/target_graph.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "graph/delta_net.hpp"

namespace dflash {
namespace {

/// Consecutive slices of one i32 input, so that a step uploads its indices in one transfer.
class IntSlices {
  public:
    IntSlices(Graph & graph, int64_t n, const char * name = "ints")
        : ctx_(graph.ctx()), all_(graph.input(GGML_TYPE_I32, name, std::max<int64_t>(n, 1))) {}
    ggml_tensor * take(int64_t n) {
        ggml_tensor * slice = ggml_view_1d(ctx_, all_, n, at_ * sizeof(int32_t));
        at_ += static_cast<size_t>(n);
        return slice;
    }
    ggml_tensor * all() const { return all_; }

  private:
    ggml_context * ctx_;
    ggml_tensor * all_;
    size_t at_ = 0;
};

int32_t tap_of(const TargetCache & cache, int32_t layer) {
    const auto & taps = cache.options().capture_layers;
    const auto it = std::find(taps.begin(), taps.end(), layer);
    return it == taps.end() ? -1 : static_cast<int32_t>(it - taps.begin());
}

} // namespace

std::unique_ptr<TargetGraph> build_target_graph(const TargetCache & cache, const TargetGraphShape & shape) {
    const TargetModel & model = cache.model();
    const TargetConfig & c = model.config();
    auto built = std::make_unique<TargetGraph>();
    built->shape = shape;
    const int64_t n = shape.n_rows;
    const size_t per_layer = c.is_moe ? 120 + 2 * static_cast<size_t>(c.n_expert_used) : 80;
    built->graph = std::make_unique<Graph>(model.device(),
                                           256 + per_layer * static_cast<size_t>(shape.layer_end - shape.layer_begin));
    Graph & graph = *built->graph;
    ggml_context * ctx = graph.ctx();

    const bool host_ids = !shape.from_hidden && shape.device_ids == nullptr && model.tok_embd() != nullptr;
    IntSlices ints(graph, n * (host_ids ? 3 : 2) + shape.n_out);
    built->ints = ints.all();
    RowInputs rows;
    rows.positions = ints.take(n);
    rows.kv_rows = graph.input(GGML_TYPE_I64, "kv_rows", n);
    built->kv_rows = rows.kv_rows;
    ggml_tensor * feature_rows = ints.take(n);
    ggml_tensor * out_rows = shape.n_out > 0 ? ints.take(shape.n_out) : nullptr;
    rows.n_kv = shape.n_kv;
    if (c.n_full_layers(shape.layer_begin, shape.layer_end) > 0) {
        built->mask = std::make_unique<AttentionMask>(graph, shape.n_kv, n, cache.options().fa_window);
        rows.mask = built->mask->tensor();
    }

    TreeRows tree;
    if (shape.tree_levels > 0) {
        tree.n_levels = shape.tree_levels;
        tree.n_paths = shape.tree_paths;
        IntSlices tree_ints(graph, n * (c.ssm_d_conv + 1) + tree.n_levels * tree.n_paths, "tree_ints");
        tree.conv_rows = tree_ints.take(n * c.ssm_d_conv);
        tree.path_rows = tree_ints.take(tree.n_levels * tree.n_paths);
        tree.place = tree_ints.take(n);
        built->tree_ints = tree_ints.all();
        rows.tree = &tree;
    }

    ggml_tensor * x = nullptr;
    if (host_ids) {
        x = ggml_get_rows(ctx, model.tok_embd(), ints.take(n));
        built->has_host_ids = true;
    } else if (!shape.from_hidden && shape.device_ids != nullptr) {
        check(model.tok_embd() != nullptr, Status::internal, "ids on the device without an embedding there");
        x = ggml_get_rows(ctx, model.tok_embd(), ggml_view_1d(ctx, shape.device_ids, n, 0));
    } else {
        built->activations = graph.input(GGML_TYPE_F32, "activations", c.n_embd, n);
        x = built->activations;
    }

    const bool head = shape.n_out > 0;
    built->moe_selected.assign(static_cast<size_t>(shape.layer_end - shape.layer_begin), nullptr);
    for (int32_t il = shape.layer_begin; il < shape.layer_end; ++il) {
        const TargetLayer & l = model.layer(il);
        const bool last = il + 1 == shape.layer_end;
        const int32_t tap = tap_of(cache, il);
        const bool inspected =
            std::find(shape.hidden_layers.begin(), shape.hidden_layers.end(), il) != shape.hidden_layers.end();
        DeltaNetCapture capture;
        ggml_tensor * mixed = build_mixer(graph, cache, il, build_norm(ctx, x, l.attn_norm, c.rms_eps), rows,
                                          shape.verify ? StateUpdate::keep : StateUpdate::write, &capture);
        graph.expand(mixed);
        if (capture.layer >= 0) {
            built->captures.push_back(capture);
        }
        const bool every_row = tap >= 0 || inspected || shape.want_hidden;
        if (last && !every_row && head && shape.n_out < n) {
            mixed = ggml_get_rows(ctx, mixed, out_rows);
            x = ggml_get_rows(ctx, x, out_rows);
            out_rows = nullptr;
        }
        x = ggml_add(ctx, x, mixed);
        if (last && !every_row && !head) {
            break; // nothing reads this layer's output
        }
        ggml_tensor ** selected = &built->moe_selected[static_cast<size_t>(il - shape.layer_begin)];
        ggml_tensor * ff = build_feed_forward(ctx, c, l, build_norm(ctx, x, l.attn_post_norm, c.rms_eps), selected);
        if (*selected != nullptr) {
            *selected = ggml_cont(ctx, *selected);
            graph.keep(*selected);
        }
        x = ggml_add(ctx, x, ff);
        if (tap >= 0) {
            ggml_tensor * ring = cache.target_feat();
            ggml_tensor * slice = ggml_view_2d(ctx, ring, c.n_embd, ring->ne[1], ring->nb[1],
                                               ggml_row_size(ring->type, int64_t{tap} * c.n_embd));
            graph.expand(ggml_set_rows(ctx, slice, x, feature_rows));
        }
        if (inspected) {
            graph.keep(x);
            built->hidden.push_back(x);
        }
        if (last && shape.want_hidden) {
            graph.keep(x);
            built->hidden_out = x;
        }
    }
    if (head) {
        if (out_rows != nullptr && shape.n_out < n) {
            x = ggml_get_rows(ctx, x, out_rows);
        }
        x = build_norm(ctx, x, model.out_norm(), c.rms_eps);
        built->logits = build_linear(ctx, model.output(), x);
        graph.keep(built->logits);
        if (!model.device()->is_cpu()) {
            built->argmax = ggml_argmax(ctx, built->logits);
            graph.keep(built->argmax);
        }
    }
    graph.finish(shape.verify ? "verify forward" : "target forward");
    return built;
}

std::unique_ptr<CommitGraph> build_commit_graph(const TargetCache & cache, const TargetGraph & verify, int32_t n_rows) {
    const TargetConfig & c = cache.model().config();
    check(n_rows >= 1 && n_rows <= verify.shape.n_rows, Status::internal, "commit of %d rows, want 1 to %d", n_rows,
          verify.shape.n_rows);
    auto built = std::make_unique<CommitGraph>();
    built->n_rows = n_rows;
    built->graph = std::make_unique<Graph>(cache.model().device(), 64 + 24 * verify.captures.size());
    Graph & graph = *built->graph;
    ggml_context * ctx = graph.ctx();
    const int64_t n = n_rows;
    const int64_t s = c.ssm_d_state;
    const int64_t hk = c.ssm_n_group;
    const int64_t hv = c.ssm_dt_rank;
    const auto by_head = [&](ggml_tensor * t) { return ggml_view_2d(ctx, t, hv, n, t->nb[2], 0); };
    built->keep = graph.input(GGML_TYPE_F32, "keep", 1, n);
    built->conv_rows = graph.input(GGML_TYPE_I32, "conv_rows", c.ssm_d_conv - 1);
    for (const DeltaNetCapture & captured : verify.captures) {
        DeltaNetCapture d = captured;
        for (ggml_tensor ** t : {&d.conv_input, &d.qk, &d.qkv, &d.g, &d.beta}) {
            *t = graph.alias(*t);
        }
        ggml_tensor * state = cache.ssm_state(d.layer);
        ggml_tensor * k =
            ggml_view_3d(ctx, d.qk, s, hk, n, d.qk->nb[1], d.qk->nb[2], d.qk->nb[1] * static_cast<size_t>(hk));
        ggml_tensor * v = ggml_view_3d(ctx, d.qkv, s, hv, n, ggml_row_size(d.qkv->type, s), d.qkv->nb[1],
                                       ggml_row_size(d.qkv->type, 2 * hk * s));
        ggml_tensor * g = ggml_mul(ctx, by_head(d.g), built->keep);
        ggml_tensor * beta = ggml_mul(ctx, by_head(d.beta), built->keep);
        build_delta_state(graph, k, v, ggml_reshape_3d(ctx, g, 1, hv, n), ggml_reshape_3d(ctx, beta, 1, hv, n), state);
        graph.expand(ggml_cpy(ctx, ggml_get_rows(ctx, d.conv_input, built->conv_rows), cache.conv_state(d.layer)));
    }
    graph.finish("commit");
    return built;
}

} // namespace dflash
