#include "check.hpp"

#include <limits>

#include "gguf/gguf_file.hpp"
#include "gguf_bytes.hpp"
#include "scratch_file.hpp"

using namespace dflash;
using namespace dflash::testing;

namespace {

std::shared_ptr<const GgufFile> opened(const GgufBytes & file) {
    const ScratchFile scratch(file.bytes(), "model.gguf");
    return GgufFile::open(scratch.path());
}

std::shared_ptr<const GgufFile> opened_with_key(const std::string & key) {
    GgufBytes file = sample_gguf();
    file.keys.push_back(key);
    return opened(file);
}

constexpr int64_t lowest = std::numeric_limits<int64_t>::min();
constexpr int64_t highest = std::numeric_limits<int64_t>::max();

} // namespace

TEST(a_good_file_is_read_back) {
    const GgufBytes bytes = sample_gguf();
    const auto file = opened(bytes);
    CHECK_EQ(file->version(), 3u);
    CHECK_EQ(file->architecture(), "sample");
    CHECK_EQ(file->total_bytes(), bytes.bytes().size());
    CHECK_EQ(file->values().size(), bytes.keys.size());
    CHECK_EQ(file->require_int("n.u8", 0, 255), 200);
    CHECK_EQ(file->require_int("n.i8", -128, 127), -100);
    CHECK_EQ(file->require_int("n.u16", 0, highest), 60000);
    CHECK_EQ(file->require_int("n.i16", lowest, highest), -30000);
    CHECK_EQ(file->require_int("n.u32", 0, highest), 4000000000);
    CHECK_EQ(file->require_int("n.i32", lowest, 0), -2000000000);
    CHECK_EQ(file->require_int("n.i64", lowest, 0), -(1ll << 62));
    CHECK_EQ(file->require_float("x.f32", 0, 2), 1.5);
    CHECK_EQ(file->require_float("x.f64", -3, 0), -2.25);
    CHECK_EQ(file->number_at(*file->find("n.u64"), 0), 9223372036854775808.0);
    CHECK_EQ(file->require_int("n.u8", 200, 200), 200); // limits are inclusive
    CHECK_EQ(file->require_float("x.f32", 1.5, 1.5), 1.5);
    const auto largest = opened_with_key(gguf_key("n", GgufType::u64, bytes_of<uint64_t>(highest)));
    CHECK_EQ(largest->require_int("n", 0, highest), highest);
    CHECK(file->bool_or("flag", false));
    CHECK(file->bools_or("bools", {}, 4) == std::vector<bool>({true, true, false, true}));
    CHECK(file->bools_or("bits", {}, 3) == std::vector<bool>({true, false, true}));
    CHECK(file->ints_or("ints", {}, 3) == std::vector<int64_t>({3, -4, 5}));
    CHECK(file->ints_or("n.u8", {}, 1) == std::vector<int64_t>({200}));
    CHECK(file->floats_or("floats", {}, 2) == std::vector<double>({0.5, -8.0}));
    CHECK(file->find("missing") == nullptr);
    CHECK(file->find("") == nullptr);
}

TEST(types_have_names) {
    const char * const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                  "bool", "string", "array", "u64", "i64", "f64"};
    for (uint32_t id = 0; id < 13; ++id) {
        CHECK_EQ(std::string(gguf_type_name(static_cast<GgufType>(id))), names[id]);
    }
    CHECK_EQ(std::string(gguf_type_name(static_cast<GgufType>(13))), "unknown");
}

TEST(strings_have_random_access) {
    const auto file = opened(sample_gguf());
    const GgufValue & tokens = *file->find("tokens");
    CHECK_EQ(tokens.count, 100u);
    CHECK(tokens.type == GgufType::array && tokens.element_type == GgufType::string);
    CHECK_EQ(tokens.string_marks.size(), 4u);
    for (int i = 99; i >= 0; --i) {
        CHECK_EQ(file->string_at(tokens, static_cast<uint64_t>(i)), sample_token(i));
    }
    CHECK_THROWS_WITH(Status::invalid, "index 100, want below 100", file->string_at(tokens, 100));
    CHECK_THROWS(Status::invalid, file->string_at(*file->find("none"), 0));
    CHECK_THROWS(Status::invalid, file->string_at(*file->find("general.architecture"), 1));
    CHECK_THROWS(Status::invalid, file->int_at(*file->find("ints"), 3));
    CHECK_THROWS(Status::invalid, file->number_at(*file->find("floats"), 1ull << 62));
    CHECK_THROWS(Status::format, file->int_at(tokens, 0));
    CHECK_THROWS(Status::format, file->int_at(*file->find("flag"), 0));
    CHECK_THROWS(Status::format, file->number_at(tokens, 0));
    CHECK_THROWS(Status::format, file->string_at(*file->find("ints"), 0));
    CHECK_EQ(file->int_at(*file->find("ints"), 1), -4);
    CHECK_EQ(file->number_at(*file->find("floats"), 1), -8.0);
    CHECK_EQ(file->raw_bytes(*file->find("ints")), 12u);
    CHECK_EQ(file->raw_bytes(*file->find("general.architecture")), 14u);
    CHECK_EQ(static_cast<int>(file->raw(*file->find("general.architecture"))[0]), 6);
}

TEST(look_ups_name_file_key_found_and_wanted) {
    const auto file = opened(sample_gguf());
    const std::string path = file->path();
    CHECK_THROWS_WITH(Status::format, (path + ": key \"gone\" is missing, want an integer").c_str(),
                      file->require_int("gone", 0, 1));
    CHECK_THROWS_WITH(Status::format, "key \"x.f32\" has type f32, want an integer", file->int_or("x.f32", 0, 0, 9));
    CHECK_THROWS_WITH(Status::format, "key \"n.u8\" is 200, want 1 to 100", file->require_int("n.u8", 1, 100));
    CHECK_THROWS_WITH(Status::format, "holds 9223372036854775808", file->require_int("n.u64", 0, highest));
    CHECK_THROWS_WITH(Status::format, "array of 3 i32", file->require_int("ints", 0, 9));
    CHECK_THROWS_WITH(Status::format, "has type u8", file->require_float("n.u8", 0, 999));
    CHECK_THROWS_WITH(Status::format, "is 1.5, want 2 to 3", file->float_or("x.f32", 2.5, 2, 3));
    CHECK_THROWS(Status::format, file->bool_or("n.u8", true));
    CHECK_THROWS(Status::format, file->require_string("flag"));
    CHECK_THROWS(Status::format, file->string_or("tokens", ""));
    CHECK_THROWS_WITH(Status::format, "has 3 elements, want at most 2", file->ints_or("ints", {}, 2));
    CHECK_THROWS(Status::format, file->ints_or("floats", {}, 9));
    CHECK_THROWS(Status::format, file->ints_or("bools", {}, 9));
    CHECK_THROWS_WITH(Status::format, "holds 3 at index 0, want 0 or 1", file->bools_or("ints", {}, 9));
    CHECK_THROWS(Status::format, file->bools_or("flag", {}, 9));
    CHECK_THROWS(Status::format, file->bools_or("tokens", {}, 999));
    CHECK_THROWS(Status::format, file->floats_or("ints", {}, 9));
    CHECK_EQ(file->int_or("gone", -7, 0, 1), -7);
    CHECK_EQ(file->float_or("gone", 9.5, 0, 1), 9.5);
    CHECK_EQ(file->string_or("gone", "else"), "else");
    CHECK(!file->bool_or("gone", false));
    CHECK(file->ints_or("gone", {1, 2}, 1) == std::vector<int64_t>({1, 2}));
    CHECK(file->bools_or("gone", {true}, 1) == std::vector<bool>({true}));
    CHECK(file->floats_or("gone", {0.5}, 1) == std::vector<double>({0.5}));
}

TEST(numbers_that_are_not_finite_are_refused) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const double infinite = std::numeric_limits<double>::infinity();
    const auto file = opened_with_key(gguf_key("bad", GgufType::f32, bytes_of(nan)));
    CHECK_THROWS(Status::format, file->require_float("bad", -infinite, infinite));
    const auto other = opened_with_key(gguf_array("bad", GgufType::f64, 1, bytes_of(infinite)));
    CHECK_THROWS_WITH(Status::format, "inf", other->floats_or("bad", {}, 9));
}
