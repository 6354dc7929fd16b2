#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

/// The tokens of one sequence in order (prompt, then every accepted token including the current anchor), and how often
/// each occurs among the last `window` of them. Memory: 4 bytes per token, and with a window 4 n_vocab bytes besides.
/// One thread at a time per object.
class TokenHistory {
  public:
    struct Count {
        int32_t token = 0;
        int32_t count = 0; // >= 1
    };

    /// window: -1 counts the whole history, 0 counts nothing. Throws Status::invalid unless n_vocab >= 1, window >= -1.
    TokenHistory(int32_t n_vocab, int32_t window);

    /// Appends in O(1). Throws Status::invalid, changing nothing, unless 0 <= token < n_vocab.
    void push(int32_t token);

    /// Drops the newest tokens, in O(1) each, so that n remain; older ones come back into the window. Throws
    /// Status::invalid, changing nothing, unless 0 <= n <= size().
    void truncate(int64_t n);

    int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
    int32_t n_vocab() const { return n_vocab_; }
    int32_t window() const { return window_; }
    const std::vector<int32_t> & tokens() const { return tokens_; }

    /// The distinct tokens of the window in no particular order; valid until the next push or truncate.
    const std::vector<Count> & counts() const { return counts_; }

  private:
    void add(int32_t token);
    void remove(int32_t token);

    int32_t n_vocab_;
    int32_t window_;
    std::vector<int32_t> tokens_;
    std::vector<Count> counts_;
    std::vector<int32_t> slot_; // [n_vocab]: index into counts_, -1 when absent
};

} // namespace dflash
