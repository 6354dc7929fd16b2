#include "check.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "decode/token_history.hpp"

using namespace dflash;

TEST(history_counts_its_window) {
    std::mt19937 generator(5);
    for (const int32_t window : {-1, 0, 1, 2, 7, 64}) {
        TokenHistory history(12, window);
        std::vector<int32_t> tokens;
        for (int step = 0; step < 3000; ++step) {
            if (generator() % 4 == 0 && !tokens.empty()) {
                tokens.resize(tokens.size() - std::min(tokens.size(), size_t{generator() % 20}));
                history.truncate(static_cast<int64_t>(tokens.size()));
            } else {
                tokens.push_back(static_cast<int32_t>(generator() % 12));
                history.push(tokens.back());
            }
            std::vector<int32_t> want(12, 0);
            const size_t first = window < 0 ? 0 : tokens.size() - std::min(tokens.size(), static_cast<size_t>(window));
            for (size_t i = first; i < tokens.size(); ++i) {
                ++want[static_cast<size_t>(tokens[i])];
            }
            std::vector<int32_t> got(12, 0);
            for (const TokenHistory::Count & seen : history.counts()) {
                REQUIRE(seen.count >= 1 && got[static_cast<size_t>(seen.token)] == 0);
                got[static_cast<size_t>(seen.token)] = seen.count;
            }
            REQUIRE(got == want && history.tokens() == tokens);
            REQUIRE(history.size() == static_cast<int64_t>(tokens.size()));
        }
    }
}

TEST(history_refuses_what_does_not_fit) {
    CHECK_THROWS_WITH(Status::invalid, "n_vocab is 0", TokenHistory(0, 1));
    CHECK_THROWS_WITH(Status::invalid, "window is -2", TokenHistory(5, -2));
    TokenHistory history(5, 3);
    history.push(4);
    CHECK_THROWS_WITH(Status::invalid, "token 5 in the history, want 0 <= token < 5", history.push(5));
    CHECK_THROWS_WITH(Status::invalid, "token -1", history.push(-1));
    CHECK_THROWS_WITH(Status::invalid, "truncated to 2 tokens, want 0 to 1", history.truncate(2));
    CHECK_THROWS_WITH(Status::invalid, "truncated to -1", history.truncate(-1));
    CHECK_EQ(history.size(), 1);
    CHECK_EQ(history.counts().size(), size_t{1});
}
