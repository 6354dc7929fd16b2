#include "check.hpp"

#include <string>

#include "base/log.hpp"
#include "capi/dflash.h"

namespace {

std::string take(int32_t * level = nullptr) {
    char text[256] = "";
    return dflash_log_take(level, text, sizeof(text), nullptr) == DFLASH_STATUS_OK ? text : "";
}

} // namespace

TEST(lines_come_out_in_order) {
    CHECK_EQ(static_cast<int>(dflash_log_take(nullptr, nullptr, 0, nullptr)), -4);
    dflash::log(dflash::LogLevel::warning, "first %d", 1);
    dflash::log(dflash::LogLevel::error, "second");
    int32_t level = 0;
    CHECK_EQ(take(&level), "first 1");
    CHECK_EQ(level, static_cast<int32_t>(DFLASH_LOG_WARNING));
    CHECK_EQ(take(&level), "second");
    CHECK_EQ(level, static_cast<int32_t>(DFLASH_LOG_ERROR));
    CHECK_EQ(take(), "");
}

TEST(a_short_buffer_leaves_the_line) {
    dflash::log(dflash::LogLevel::info, "twelve bytes");
    char text[12] = "";
    uint64_t needed = 0;
    CHECK_EQ(static_cast<int>(dflash_log_take(nullptr, text, sizeof(text), &needed)), -8);
    CHECK_EQ(needed, 13U);
    CHECK_EQ(static_cast<int>(dflash_log_take(nullptr, nullptr, 1, nullptr)), -1);
    CHECK_EQ(take(), "twelve bytes");
}

TEST(a_full_queue_drops_the_oldest_and_says_so) {
    for (int i = 0; i < 1030; ++i) {
        dflash::log(dflash::LogLevel::debug, "%d", i);
    }
    CHECK_EQ(take(), "6 log lines were dropped");
    CHECK_EQ(take(), "6");
    int rest = 0;
    while (!take().empty()) {
        ++rest;
    }
    CHECK_EQ(rest, 1023);
}
