#include "check.hpp"

#include <limits>
#include <string>

#include "gguf/json.hpp"
#include "scratch_file.hpp"

using namespace dflash;
using namespace dflash::testing;

namespace {

constexpr int64_t lowest = std::numeric_limits<int64_t>::min();
constexpr int64_t highest = std::numeric_limits<int64_t>::max();

Json parsed(std::string_view text) {
    return Json::parse(text, "text");
}

std::string string_of(std::string_view text) {
    return parsed(text).as_string("text");
}

double number_of(std::string_view text) {
    return parsed(text).as_double("text", std::numeric_limits<double>::lowest(), std::numeric_limits<double>::max());
}

std::string repeated(std::string_view piece, size_t n) {
    std::string out;
    out.reserve(piece.size() * n);
    for (size_t i = 0; i < n; ++i) {
        out += piece;
    }
    return out;
}

} // namespace

TEST(values_of_every_kind) {
    const Json root = parsed(" {\"a\" : [1, -2.5e1, \"x\", true, false, null, {}, []],\r\n\t\"b\":{\"c\":7}} ");
    CHECK(root.is_object());
    CHECK_EQ(std::string(root.kind()), "object");
    CHECK_EQ(root.members("r").size(), 2u);
    CHECK_EQ(root.members("r")[0].key, "a");
    const Json::Array & items = root.find("a")->items("a");
    CHECK_EQ(items.size(), 8u);
    CHECK_EQ(items[0].as_int("i", 0, 9), 1);
    CHECK_EQ(items[0].as_double("i", 0, 9), 1.0);
    CHECK_EQ(items[1].as_double("i", -99, 9), -25.0);
    CHECK(items[0].is_int() && items[1].is_number() && !items[1].is_int());
    CHECK_EQ(items[2].as_string("i"), "x");
    CHECK(items[3].as_bool("i") && !items[4].as_bool("i"));
    CHECK(items[5].is_null() && items[6].is_object() && items[7].is_array());
    CHECK_EQ(root.find("b")->find("c")->as_int("c", 7, 7), 7);
    CHECK(root.find("d") == nullptr && items[7].find("a") == nullptr && Json().find("a") == nullptr);
}

TEST(accessors_name_what_was_found) {
    const Json root = parsed("[1, 1.0, \"x\", null, true, {}, []]");
    const Json::Array & items = root.items("r");
    CHECK_THROWS_WITH(Status::format, "c.json: key k: found 1, want 2 to 3", items[0].as_int("c.json: key k", 2, 3));
    CHECK_THROWS_WITH(Status::format, "found number, want an integer", items[1].as_int("k", 0, 9));
    CHECK_THROWS_WITH(Status::format, "found 1, want 2 to 3", items[1].as_double("k", 2, 3));
    CHECK_EQ(items[1].as_double("k", 1, 1), 1.0); // limits are inclusive
    CHECK_THROWS_WITH(Status::format, "found string, want a number", items[2].as_double("k", 0, 9));
    CHECK_THROWS_WITH(Status::format, "found null, want a string", items[3].as_string("k"));
    CHECK_THROWS_WITH(Status::format, "found integer, want bool", items[0].as_bool("k"));
    CHECK_THROWS_WITH(Status::format, "found object, want an array", items[5].items("k"));
    CHECK_THROWS_WITH(Status::format, "found array, want an object", items[6].members("k"));
    CHECK_THROWS_WITH(Status::format, "found bool, want an integer", items[4].as_int("k", 0, 1));
}

TEST(numbers) {
    CHECK_EQ(parsed("9223372036854775807").as_int("n", lowest, highest), highest);
    CHECK_EQ(parsed("-9223372036854775808").as_int("n", lowest, highest), lowest);
    CHECK(!parsed("9223372036854775808").is_int());
    CHECK_EQ(number_of("18446744073709551615"), 18446744073709551615.0);
    CHECK_EQ(parsed("-0").as_int("n", 0, 0), 0);
    CHECK_EQ(number_of("0.1"), 0.1);
    CHECK_EQ(number_of("1.7976931348623157e308"), std::numeric_limits<double>::max());
    CHECK_EQ(number_of("5e-324"), std::numeric_limits<double>::denorm_min());
    CHECK_EQ(number_of("1E+2"), 100.0);
    CHECK_EQ(number_of("1e-7"), 1e-7);
    CHECK(!parsed("1e2").is_int());
    CHECK_EQ(number_of("0." + std::string(1022, '1')), 1.0 / 9.0);
    CHECK_THROWS_WITH(Status::format, "1025 characters", parsed("0." + std::string(1023, '1')));
    CHECK_THROWS_WITH(Status::format, "does not fit a double", parsed(std::string(400, '9')));
    for (const char * bad : {"01", "-01", "1.", ".5", "+1", "-", "1e", "1e+", "0x1", "1_0", "NaN", "Infinity",
                             "-Infinity", "1e999", "-1e999", "--1", "1.5.5", "1,5"}) {
        CHECK_THROWS(Status::format, parsed(bad));
    }
}

TEST(strings) {
    CHECK_EQ(string_of("\"\""), "");
    CHECK_EQ(string_of("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\""), "\"\\/\b\f\n\r\t");
    CHECK_EQ(string_of("\"\\u0041\\u00e9\\u20AC\\ud83d\\uDE00\""), "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    CHECK_EQ(string_of("\"\\u0000\""), std::string(1, '\0'));
    CHECK_EQ(string_of("\"\\u007f\\u0080\\u07FF\\u0800\\ud7ff\\ue000\\uFFFF\""),
             "\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf");
    CHECK_EQ(string_of("\"\\ud800\\udc00\\uDBFF\\uDFFF\""), "\xf0\x90\x80\x80\xf4\x8f\xbf\xbf");
    CHECK_EQ(string_of("\"\\u0aAf a b\""), "\xe0\xaa\xaf a b");
    CHECK_EQ(string_of("\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\""), "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    for (const char * bad : {"\"",
                             "\"a",
                             "'a'",
                             "\"\\x41\"",
                             "\"\\",
                             "\"\\u00g0\"",
                             "\"\\u12\"",
                             "\"\\ud800\"",
                             "\"\\ud800\\u0041\"",
                             "\"\\udc00\"",
                             "\"\\udfff\"",
                             "\"\\ud800\\udbff\"",
                             "\"\\ud800\\ue000\"",
                             "\"\\ud800\\ud800\"",
                             "\"a\nb\"",
                             "\"a\tb\"",
                             "\"\xff\"",
                             "\"\xc0\x80\"",
                             "\"\xe0\x80\x80\"",
                             "\"\xed\xa0\x80\"",
                             "\"\xf4\x90\x80\x80\"",
                             "\"\xf5\x80\x80\x80\"",
                             "\"\xc3\"",
                             "\"\x80\"",
                             "\"\xf0\x9f\x98\"",
                             "\"\xc3\\u00a9\""}) {
        CHECK_THROWS(Status::format, parsed(bad));
    }
    CHECK_THROWS(Status::format, parsed(std::string("\"a\0b\"", 5)));
}

TEST(nothing_behind_the_text_is_read) {
    CHECK_EQ(parsed(std::string_view("12345", 3)).as_int("n", 0, 999), 123);
    CHECK(parsed(std::string_view("[]]", 2)).is_array());
    CHECK(parsed(std::string_view("7 8", 2)).is_int());
    for (const char * whole : {"\"ab\"", "[1]", "{\"a\":1}", "\"\\n\"", "\"\\u00e9\"", "\"\\ud83d\\ude00\"", "true",
                               "null", "[\"\xc3\xa9\"]", "-1"}) {
        for (size_t n = 0; n < std::strlen(whole); ++n) {
            CHECK_THROWS(Status::format, parsed(std::string_view(whole, n)));
        }
    }
    for (size_t n : {2, 3}) {
        CHECK_THROWS(Status::format, parsed(std::string_view("1e+5", n)));
    }
    CHECK_THROWS_WITH(Status::format, "found the end of the text", parsed(std::string_view("[1]", 2)));
}

TEST(what_strict_json_refuses) {
    for (const char * bad : {"",         " ",          "{",     "}",
                             "[",        "]",          "[1",    "[1,",
                             "[1,]",     "[,1]",       "[1 2]", "{\"a\"}",
                             "{\"a\":}", "{\"a\":1,}", "{a:1}", "{\"a\":1 \"b\":2}",
                             "{,}",      "{1:2}",      "tru",   "True",
                             "nul",      "nulll",      "1 2",   "[] []",
                             "[]x",      "// c\n1",    "/**/1", "\xef\xbb\xbf{}",
                             "[\v1]"}) {
        CHECK_THROWS_WITH(Status::format, "text: JSON at byte", parsed(bad));
    }
    CHECK_THROWS(Status::format, parsed(std::string("{}\0", 3)));
    CHECK_THROWS_WITH(Status::format, "key \"a\" occurs twice", parsed("{\"a\":1,\"b\":2,\"a\":3}"));
    CHECK_THROWS_WITH(Status::format, "key \"a\" occurs twice", parsed("[{\"a\":1,\"\\u0061\":3}]"));
    CHECK_EQ(parsed("[{\"a\":1},{\"a\":2}]").items("r").size(), 2u);
    CHECK_THROWS_WITH(Status::format, "at byte 4: found \"}\"", parsed("[1, }"));
}

TEST(depth_and_size_are_limited) {
    CHECK(parsed(repeated("[", 64) + repeated("]", 64)).is_array());
    CHECK_THROWS_WITH(Status::format, "nested deeper than 64", parsed(repeated("[", 65) + repeated("]", 65)));
    CHECK_THROWS_WITH(Status::format, "nested deeper than 64", parsed(repeated("{\"a\":", 65)));
    CHECK_THROWS_WITH(Status::format, "6 bytes of JSON, want at most 5", Json::parse("[1, 2]", "text", 5));
    CHECK(Json::parse("[1, 2]", "text", 6).is_array());
    const std::string most = "[" + repeated("0,", Json::max_values - 2) + "0]";
    CHECK_EQ(parsed(most).items("r").size(), Json::max_values - 1);
    CHECK_THROWS_WITH(Status::format, "more than 500000 values", parsed("[0," + most.substr(1)));
}

TEST(bombs_cost_little) {
    const size_t limit = Json::default_max_bytes;
    const std::string bombs[] = {
        std::string(limit, '['),
        "[" + repeated("0,", limit / 2 - 1),
        "[" + repeated("[],", limit / 3 - 1),
        "[" + repeated("{},", limit / 3 - 1),
        "[" + repeated("\"sixteen letters!\",", limit / 19 - 1),
        "{" + repeated("\"sixteen letters!\":{\"sixteen letters!\":0},", limit / 42 - 1),
        "\"" + std::string(limit - 1, 'x'),
        "\"" + repeated("\\n", limit / 2 - 1),
        std::string(limit, '1'),
        "0." + std::string(limit - 3, '1') + "x",
        std::string(limit, ' '),
        std::string(100000000, '['),
    };
    for (const std::string & bomb : bombs) {
        CHECK(fenced_status(0, [&] { Json::parse(bomb, "bomb"); }) == Status::format);
    }
}

TEST(many_keys_take_no_quadratic_time) {
    std::string text = "{";
    for (int i = 0; i < 200000; ++i) {
        text += "\"key " + std::to_string(i * 7919 % 200000) + "\":0,";
    }
    text += "\"key 5\":0}";
    CHECK(fenced_status(0, [&] { Json::parse(text, "keys"); }) == Status::format);
}

TEST(damaged_texts_never_crash) {
    const std::string good = "{\"a\":[1,-2.5e1,\"x\\u00e9\\n\",true,false,null,{},[]],\"b\":{\"c\":\"\xc3\xa9\"},"
                             "\"d\":18446744073709551615}";
    TestRandom random(7);
    int refused = 0;
    for (int round = 0; round < 20000; ++round) {
        const std::string bytes = damaged(good, random);
        try {
            parsed(bytes);
        } catch (const Error & error) {
            CHECK(error.status() == Status::format && std::strchr(error.what(), '\n') == nullptr);
            ++refused;
        }
    }
    CHECK(refused > 5000 && refused < 20000);
}
