#include "decode/token_history.hpp"

#include "base/error.hpp"

namespace dflash {

TokenHistory::TokenHistory(int32_t n_vocab, int32_t window) : n_vocab_(n_vocab), window_(window) {
    check(n_vocab >= 1, Status::invalid, "n_vocab is %d, want >= 1", n_vocab);
    check(window >= -1, Status::invalid, "history window is %d, want >= -1", window);
    if (window != 0) {
        slot_.assign(static_cast<size_t>(n_vocab), -1);
    }
}

void TokenHistory::push(int32_t token) {
    check(token >= 0 && token < n_vocab_, Status::invalid, "token %d in the history, want 0 <= token < %d", token,
          n_vocab_);
    if (window_ != 0 && counts_.size() == counts_.capacity()) {
        counts_.reserve(2 * counts_.size() + 64);
    }
    tokens_.push_back(token);
    if (window_ != 0) {
        add(token);
        if (window_ > 0 && size() > window_) {
            remove(tokens_[static_cast<size_t>(size() - window_ - 1)]);
        }
    }
}

void TokenHistory::truncate(int64_t n) {
    check(n >= 0 && n <= size(), Status::invalid, "history truncated to %lld tokens, want 0 to %lld",
          static_cast<long long>(n), static_cast<long long>(size()));
    while (size() > n) {
        if (window_ != 0) {
            remove(tokens_.back());
            if (window_ > 0 && size() > window_) {
                add(tokens_[static_cast<size_t>(size() - window_ - 1)]);
            }
        }
        tokens_.pop_back();
    }
}

void TokenHistory::add(int32_t token) {
    int32_t & slot = slot_[static_cast<size_t>(token)];
    if (slot < 0) {
        slot = static_cast<int32_t>(counts_.size());
        counts_.push_back({token, 0});
    }
    ++counts_[static_cast<size_t>(slot)].count;
}

void TokenHistory::remove(int32_t token) {
    const int32_t slot = slot_[static_cast<size_t>(token)];
    Count & entry = counts_[static_cast<size_t>(slot)];
    if (--entry.count == 0) {
        entry = counts_.back();
        slot_[static_cast<size_t>(entry.token)] = slot;
        slot_[static_cast<size_t>(token)] = -1;
        counts_.pop_back();
    }
}

} // namespace dflash
