#include "graph/draft_heads.hpp"

#include <algorithm>

#include "graph/target_blocks.hpp"

namespace dflash {
namespace {

ggml_tensor * column(ggml_context * ctx, ggml_tensor * t, int64_t i) {
    return ggml_view_2d(ctx, t, t->ne[0], 1, t->nb[1], static_cast<size_t>(i) * t->nb[1]);
}

/// Values at ids [k, n] of the columns of table [n_vocab, n]: [k, n].
ggml_tensor * picked(ggml_context * ctx, ggml_tensor * table, ggml_tensor * ids) {
    ggml_tensor * rows = ggml_reshape_3d(ctx, table, 1, table->ne[0], table->ne[1]);
    return ggml_reshape_2d(ctx, ggml_get_rows(ctx, rows, ids), ids->ne[0], ids->ne[1]);
}

/// One walk over the slots of a block.
class Chain {
  public:
    Chain(Graph & graph, const DraftModel & model, ggml_tensor * logits, ggml_tensor * hidden)
        : graph_(graph), ctx_(graph.ctx()), model_(model), head_(model.chain()), logits_(logits), hidden_(hidden),
          n_(logits->ne[1]) {
        gate_ = head_.gate.w != nullptr ? build_linear(ctx_, head_.gate, hidden) : nullptr;
        result_.ids = graph.input(GGML_TYPE_I32, "chained ids", n_);
        result_.chances = graph.input(GGML_TYPE_F32, "chained chances", n_);
    }

    ChainResult run(ggml_tensor * anchor, int32_t n_top) {
        const bool selects = model_.config().selector_rank > 0;
        if (selects) {
            note_candidates(model_.config().selector_top_k);
        }
        ggml_tensor * before = anchor;
        for (int64_t i = 0; i < n_; ++i) {
            ggml_tensor * previous = ggml_get_rows(ctx_, head_.previous, before);
            before = ggml_reshape_1d(ctx_, selects ? select(i, previous) : step(i, previous), 1);
            graph_.expand(ggml_cpy(ctx_, before, ggml_view_1d(ctx_, result_.ids, 1, at(i))));
            note_chance(i, previous);
        }
        if (n_top > 0) {
            if (!selects) {
                note_candidates(static_cast<int32_t>(std::min<int64_t>(n_top, logits_->ne[0])));
            }
            add_alternatives(anchor);
        }
        return result_;
    }

  private:
    static size_t at(int64_t i) { return static_cast<size_t>(i) * sizeof(int32_t); }

    /// The likeliest tokens of every slot, and their rows of the table of next tokens.
    void note_candidates(int32_t k) {
        result_.n_top = k;
        candidates_ = ggml_top_k(ctx_, logits_, k); // [k, n], rows of the head
        values_ = picked(ctx_, logits_, candidates_);
        ggml_tensor * flat = ggml_reshape_1d(ctx_, candidates_, k * n_);
        ggml_tensor * mapped =
            model_.d2t() != nullptr ? ggml_reshape_1d(ctx_, ggml_get_rows(ctx_, model_.d2t(), flat), k * n_) : flat;
        target_ids_ = mapped;
        // A selector knows tokens by the target's numbers, a Markov head by those of the head that it adds to.
        next_ = ggml_get_rows(ctx_, head_.next.w, model_.config().selector_rank > 0 ? mapped : flat);
        if (head_.next.scale != 1.0f) {
            next_ = ggml_scale(ctx_, next_, head_.next.scale);
        }
        next_ = ggml_reshape_3d(ctx_, next_, next_->ne[0], k, n_);
    }

    ggml_tensor * next_of(int64_t i) {
        return ggml_view_2d(ctx_, next_, next_->ne[0], next_->ne[1], next_->nb[1],
                            static_cast<size_t>(i) * next_->nb[2]);
    }

    ggml_tensor * select(int64_t i, ggml_tensor * previous) {
        ggml_tensor * condition = ggml_mul(ctx_, previous, column(ctx_, gate_, i));
        scores_ = ggml_add(ctx_, ggml_mul_mat(ctx_, next_of(i), condition), column(ctx_, values_, i));
        const int64_t k = candidates_->ne[0];
        ggml_tensor * ids = ggml_reshape_2d(ctx_, ggml_view_1d(ctx_, target_ids_, k, at(i * k)), 1, k);
        chosen_ = ggml_argmax(ctx_, scores_);
        return ggml_get_rows(ctx_, ids, chosen_);
    }

    ggml_tensor * step(int64_t i, ggml_tensor * previous) {
        // In place: what is read as logits afterwards is what was chosen by.
        scores_ = ggml_add_inplace(ctx_, column(ctx_, logits_, i), build_linear(ctx_, head_.next, previous));
        chosen_ = ggml_argmax(ctx_, scores_);
        return model_.d2t() != nullptr ? ggml_get_rows(ctx_, model_.d2t(), chosen_) : chosen_;
    }

    void note_chance(int64_t i, ggml_tensor * previous) {
        ggml_tensor * chance = nullptr;
        if (head_.confidence.w != nullptr) {
            ggml_tensor * seen = column(ctx_, hidden_, i);
            if (model_.config().confidence_sees_previous) {
                seen = ggml_concat(ctx_, ggml_cont(ctx_, seen), previous, 0);
            }
            chance = ggml_sigmoid(ctx_, build_linear(ctx_, head_.confidence, seen));
        } else {
            ggml_tensor * law = ggml_reshape_2d(ctx_, ggml_soft_max(ctx_, scores_), 1, scores_->ne[0]);
            chance = ggml_get_rows(ctx_, law, chosen_);
        }
        graph_.expand(ggml_cpy(ctx_, ggml_reshape_1d(ctx_, chance, 1), ggml_view_1d(ctx_, result_.chances, 1, at(i))));
    }

    /// Scores of all pairs of neighbouring candidates.
    void add_alternatives(ggml_tensor * anchor) {
        const int64_t k = result_.n_top;
        ggml_tensor * own = values_; // without what the chain's predecessors add
        ggml_tensor * behind_chain = nullptr;
        ggml_tensor * chain = ggml_get_rows(ctx_, head_.previous, anchor); // [rank, n]: rows of the predecessors
        if (n_ > 1) {
            ggml_tensor * others = ggml_get_rows(ctx_, head_.previous, ggml_view_1d(ctx_, result_.ids, n_ - 1, 0));
            chain = ggml_concat(ctx_, chain, others, 1);
        }
        if (gate_ != nullptr) {
            chain = ggml_mul(ctx_, chain, gate_);
        }
        ggml_tensor * added = ggml_mul_mat(ctx_, next_, ggml_reshape_3d(ctx_, chain, chain->ne[0], 1, n_));
        added = ggml_reshape_2d(ctx_, added, k, n_);
        if (gate_ != nullptr) {
            behind_chain = ggml_soft_max(ctx_, ggml_add(ctx_, values_, added));
        } else {
            own = ggml_sub(ctx_, values_, added);
            behind_chain = picked(ctx_, ggml_soft_max(ctx_, logits_), candidates_);
        }
        result_.top_chance = behind_chain;
        result_.first = ggml_add(ctx_, ggml_cont(ctx_, column(ctx_, own, 0)), ggml_cont(ctx_, column(ctx_, added, 0)));
        result_.top_ids = target_ids_;
        for (ggml_tensor * kept : {result_.top_chance, result_.first, result_.top_ids}) {
            graph_.keep(kept);
        }
        if (n_ < 2) {
            return;
        }
        const int64_t rank = next_->ne[0];
        ggml_tensor * before = ggml_get_rows(ctx_, head_.previous, ggml_view_1d(ctx_, target_ids_, k * (n_ - 1), 0));
        before = ggml_reshape_3d(ctx_, before, rank, k, n_ - 1);
        if (gate_ != nullptr) {
            before = ggml_mul(ctx_, before,
                              ggml_view_3d(ctx_, gate_, rank, 1, n_ - 1, gate_->nb[1], gate_->nb[1], gate_->nb[1]));
        }
        ggml_tensor * after = ggml_view_3d(ctx_, next_, rank, k, n_ - 1, next_->nb[1], next_->nb[2], next_->nb[2]);
        ggml_tensor * own_after = ggml_view_3d(ctx_, own, k, 1, n_ - 1, own->nb[1], own->nb[1], own->nb[1]);
        result_.pairs = ggml_add(ctx_, ggml_mul_mat(ctx_, after, before), own_after);
        graph_.keep(result_.pairs);
    }

    Graph & graph_;
    ggml_context * ctx_;
    const DraftModel & model_;
    const DraftChain & head_;
    ggml_tensor * logits_;
    ggml_tensor * hidden_;
    int64_t n_;
    ggml_tensor * gate_ = nullptr;       // [rank, n]
    ggml_tensor * candidates_ = nullptr; // i32 [k, n]
    ggml_tensor * target_ids_ = nullptr; // i32 [k * n]
    ggml_tensor * values_ = nullptr;     // [k, n] logits of the candidates
    ggml_tensor * next_ = nullptr;       // [rank, k, n]
    ggml_tensor * scores_ = nullptr;     // of the slot at hand
    ggml_tensor * chosen_ = nullptr;     // i32 [1] index into the scores
    ChainResult result_;
};

} // namespace

GroupedConv::GroupedConv(ggml_context * ctx, const DraftConfig & config, ggml_tensor * base, const Linear & proj,
                         ggml_tensor * x_0)
    : ctx_(ctx), config_(config), base_(base) {
    if (base != nullptr) {
        dynamic_ = ggml_reshape_4d(ctx, build_linear(ctx, proj, x_0), config.n_embd / config.conv_group,
                                   config.conv_kernel, 2, x_0->ne[1]);
    }
}

ggml_tensor * GroupedConv::apply(ggml_tensor * x, int side) const {
    if (base_ == nullptr) {
        return x;
    }
    const int64_t n = x->ne[1];
    const int64_t group = config_.conv_group;
    const int64_t groups = config_.n_embd / group;
    if (!ggml_is_contiguous(x)) {
        x = ggml_cont(ctx_, x);
    }
    ggml_tensor * sum = nullptr;
    for (int64_t tap = 0; tap < std::min<int64_t>(config_.conv_kernel, n); ++tap) {
        ggml_tensor * values = x;
        if (tap > 0) { // rows move down, zeros come in
            ggml_tensor * earlier = ggml_view_2d(ctx_, x, x->ne[0], n - tap, x->nb[1], 0);
            values = ggml_pad_ext(ctx_, earlier, 0, 0, static_cast<int>(tap), 0, 0, 0, 0, 0);
        }
        values = ggml_reshape_3d(ctx_, values, group, groups, n);
        ggml_tensor * fixed =
            ggml_view_2d(ctx_, base_, group, groups, static_cast<size_t>(group) * base_->nb[0],
                         static_cast<size_t>(tap) * base_->nb[1] + static_cast<size_t>(side) * base_->nb[2]);
        ggml_tensor * dynamic =
            ggml_view_3d(ctx_, dynamic_, 1, groups, n, dynamic_->nb[0], dynamic_->nb[3],
                         static_cast<size_t>(tap) * dynamic_->nb[1] + static_cast<size_t>(side) * dynamic_->nb[2]);
        ggml_tensor * term =
            ggml_add(ctx_, ggml_mul(ctx_, values, fixed), ggml_mul(ctx_, values, ggml_cont(ctx_, dynamic)));
        sum = sum == nullptr ? term : ggml_add(ctx_, sum, term);
    }
    return ggml_reshape_2d(ctx_, sum, config_.n_embd, n);
}

ChainResult build_chain(Graph & graph, const DraftModel & model, ggml_tensor * logits, ggml_tensor * hidden,
                        ggml_tensor * anchor, int32_t n_top) {
    return Chain(graph, model, logits, hidden).run(anchor, n_top);
}

} // namespace dflash
