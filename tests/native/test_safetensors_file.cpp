#include "check.hpp"

#include <set>

#include "gguf/content_digest.hpp"
#include "gguf/safetensors_file.hpp"
#include "scratch_file.hpp"

using namespace dflash;
using namespace dflash::testing;

namespace {

std::string file_bytes(const std::string & header, const std::string & data) {
    const uint64_t length = header.size();
    std::string out(8, '\0');
    std::memcpy(&out[0], &length, 8);
    return out + header + data;
}

std::string entry(const std::string & name, const std::string & dtype, const std::string & shape, uint64_t begin,
                  uint64_t end) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
           std::to_string(begin) + "," + std::to_string(end) + "]}";
}

std::shared_ptr<const SafetensorsFile> opened(const std::string & header, size_t data_bytes) {
    const ScratchFile scratch(file_bytes(header, std::string(data_bytes, 'd')), "model.safetensors");
    return SafetensorsFile::open(scratch.path());
}

/// One tensor with a header that is otherwise right.
std::shared_ptr<const SafetensorsFile> opened_one(const std::string & dtype, const std::string & shape,
                                                  const std::string & offsets, size_t data_bytes) {
    return opened("{\"t\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}",
                  data_bytes);
}

const std::string sample_header = "{\"__metadata__\":{\"format\":\"pt\",\"note\":\"\\u00e9\"}," +
                                  entry("b", "BF16", "[2,3]", 16, 28) + "," + entry("a", "F32", "[4]", 0, 16) + "," +
                                  entry("e", "I64", "[0,7]", 28, 28) + "," + entry("s", "U8", "[]", 28, 29) + "}   ";

std::string sample_data() {
    std::string data;
    for (char c = 'a'; data.size() < 29; ++c) {
        data += c;
    }
    return data;
}

} // namespace

TEST(a_good_file_is_read_back) {
    const ScratchFile scratch(file_bytes(sample_header, sample_data()));
    const auto file = SafetensorsFile::open(scratch.path());
    CHECK_EQ(file->path(), scratch.path());
    REQUIRE(file->tensors().size() == 4);
    CHECK_EQ(file->tensors()[0].name, "b");
    CHECK(file->metadata() == (std::map<std::string, std::string>{{"format", "pt"}, {"note", "\xc3\xa9"}}));
    const SafetensorsFile::Tensor * b = file->find("b");
    REQUIRE(b != nullptr);
    CHECK_EQ(b->dtype, "BF16");
    CHECK(b->shape == std::vector<int64_t>({2, 3}));
    CHECK_EQ(b->nbytes, 12u);
    CHECK_EQ(b->offset, 8 + sample_header.size() + 16);
    CHECK_EQ(std::string(reinterpret_cast<const char *>(b->data), 3), "qrs");
    CHECK_EQ(file->find("e")->nbytes, 0u);
    CHECK(file->find("s")->shape.empty());
    CHECK_EQ(file->find("s")->nbytes, 1u);
    CHECK(file->find("__metadata__") == nullptr && file->find("c") == nullptr && file->find("") == nullptr);
}

TEST(dtypes) {
    for (const auto & [dtype, bytes] :
         {std::pair("BOOL", 48), {"F4", 24},      {"F6_E2M3", 36}, {"F6_E3M2", 36}, {"U8", 48},   {"I8", 48},
          {"F8_E5M2", 48},       {"F8_E4M3", 48}, {"F8_E8M0", 48}, {"I16", 96},     {"U16", 96},  {"F16", 96},
          {"BF16", 96},          {"I32", 192},    {"U32", 192},    {"F32", 192},    {"C64", 384}, {"F64", 384},
          {"I64", 384},          {"U64", 384}}) {
        const auto file = opened_one(dtype, "[6,8]", "[0," + std::to_string(bytes) + "]", static_cast<size_t>(bytes));
        CHECK_EQ(file->tensors()[0].nbytes, static_cast<uint64_t>(bytes));
    }
    CHECK_THROWS_WITH(Status::unsupported, "tensor \"t\": dtype \"F128\" is not known",
                      opened_one("F128", "[1]", "[0,16]", 16));
    CHECK_THROWS(Status::unsupported, opened_one("f32", "[1]", "[0,4]", 4));
    CHECK_THROWS_WITH(Status::format, "12 bits", opened_one("F4", "[3]", "[0,2]", 2));
}

TEST(header_lengths_that_lie) {
    const std::string good = file_bytes(sample_header, sample_data());
    for (const uint64_t length :
         {~0ull, ~0ull - 7, 1ull << 63, 1ull << 40, static_cast<unsigned long long>(good.size() - 7)}) {
        std::string bytes = good;
        std::memcpy(&bytes[0], &length, 8);
        const ScratchFile scratch(bytes);
        CHECK(fenced_status(0, [&] { SafetensorsFile::open(scratch.path()); }) == Status::format);
        CHECK_THROWS_WITH(Status::format, "header claims", SafetensorsFile::open(scratch.path()));
    }
    for (const uint64_t length : {0ull, 1ull, 2ull, 100ull, static_cast<unsigned long long>(good.size() - 8)}) {
        std::string bytes = good;
        std::memcpy(&bytes[0], &length, 8);
        const ScratchFile scratch(bytes);
        CHECK_THROWS(Status::format, SafetensorsFile::open(scratch.path()));
    }
    const ScratchFile scratch("1234567");
    CHECK_THROWS_WITH(Status::format, "7 bytes, want at least 8", SafetensorsFile::open(scratch.path()));
    CHECK_THROWS(Status::not_found, SafetensorsFile::open(scratch.folder() + "/gone"));
}

TEST(every_shorter_and_longer_file_is_refused) {
    const std::string good = file_bytes(sample_header, sample_data());
    const ScratchFile scratch(good);
    CHECK(SafetensorsFile::open(scratch.path()) != nullptr);
    for (size_t size = good.size(); size > 0; --size) {
        std::filesystem::resize_file(scratch.path(), size - 1);
        CHECK_THROWS(Status::format, SafetensorsFile::open(scratch.path()));
    }
    scratch.write(good + "x");
    CHECK_THROWS_WITH(Status::format, "the payloads end at byte", SafetensorsFile::open(scratch.path()));
}

TEST(header_bombs) {
    const std::string nested = "{\"a\":" + std::string(100000000, '[');
    const ScratchFile large(file_bytes(nested, ""));
    CHECK_THROWS_WITH(Status::format, "want at most 16777216", SafetensorsFile::open(large.path()));
    CHECK(fenced_status(nested.size(), [&] { SafetensorsFile::open(large.path()); }) == Status::format);
    const size_t limit = SafetensorsFile::max_header_bytes;
    for (const char * piece : {"[", "0,", "{\"dtype\":\"U8\"},"}) {
        std::string header = "{\"a\":[";
        while (header.size() < limit - 32) {
            header += piece;
        }
        const ScratchFile scratch(file_bytes(header, ""));
        CHECK(fenced_status(header.size(), [&] { SafetensorsFile::open(scratch.path()); }) == Status::format);
    }
    std::string header = "{" + entry("0", "U8", "[1]", 0, 1);
    for (int i = 1; i < 55000; ++i) {
        header += "," + entry(std::to_string(i), "U8", "[0]", 0, 0);
    }
    const ScratchFile many(file_bytes(header + "}", "xy"));
    CHECK(fenced_status(header.size(), [&] { SafetensorsFile::open(many.path()); }) == Status::format);
}

TEST(spans_that_lie) {
    CHECK_EQ(opened_one("F32", "[2]", "[0,8]", 8)->tensors().size(), 1u);
    CHECK_THROWS_WITH(Status::format, "found 0, want 8 to 8", opened_one("F32", "[2]", "[8,0]", 8));
    CHECK_THROWS_WITH(Status::format, "a span of 4 bytes, want 8", opened_one("F32", "[2]", "[0,4]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2]", "[0,9]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2]", "[4,12]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2]", "[-8,0]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2]", "[18446744073709551608,0]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2]", "[9223372036854775800,9223372036854775807]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2]", "[0.0,8.0]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2]", "[0]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2]", "[0,8,8]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2]", "\"0,8\"", 8));
    CHECK_THROWS_WITH(Status::format, "overlap or leave a gap",
                      opened("{" + entry("a", "U8", "[8]", 0, 8) + "," + entry("b", "U8", "[8]", 4, 12) + "}", 12));
    CHECK_THROWS_WITH(Status::format, "overlap or leave a gap",
                      opened("{" + entry("a", "U8", "[8]", 0, 8) + "," + entry("b", "U8", "[8]", 0, 8) + "}", 8));
    CHECK_THROWS_WITH(Status::format, "overlap or leave a gap",
                      opened("{" + entry("a", "U8", "[8]", 0, 8) + "," + entry("b", "U8", "[4]", 9, 13) + "}", 13));
    CHECK_THROWS_WITH(Status::format, "overlap or leave a gap", opened("{" + entry("a", "U8", "[8]", 1, 9) + "}", 9));
    CHECK_THROWS_WITH(Status::format, "overlap or leave a gap",
                      opened("{" + entry("a", "U8", "[8]", 0, 8) + "," + entry("b", "U8", "[0]", 4, 4) + "}", 8));
    CHECK_THROWS_WITH(Status::format, "payloads end at", opened("{" + entry("a", "U8", "[8]", 0, 8) + "}", 9));
    CHECK_THROWS_WITH(Status::format, "payloads end at", opened("{}", 1));
    CHECK(opened("{}", 0)->tensors().empty());
}

TEST(shapes_that_lie) {
    CHECK_THROWS_WITH(Status::format, "tensor \"t\": shape: found -2", opened_one("F32", "[-2]", "[0,8]", 8));
    CHECK_THROWS_WITH(Status::format, "overflows", opened_one("F32", "[4294967296,4294967296]", "[0,8]", 8));
    CHECK_THROWS_WITH(Status::format, "overflows", opened_one("F32", "[4611686018427387904]", "[0,8]", 8));
    CHECK_THROWS_WITH(Status::format, "overflows",
                      opened_one("U8", "[9223372036854775807,9223372036854775807,0]", "[0,0]", 0));
    CHECK_THROWS(Status::format, opened_one("F32", "[9223372036854775808]", "[0,8]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[2.0]", "[0,8]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "2", "[0,8]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "null", "[0,8]", 8));
    CHECK_THROWS(Status::format, opened_one("F32", "[\"2\"]", "[0,8]", 8));
}

TEST(headers_of_the_wrong_form) {
    CHECK_THROWS_WITH(Status::format, "does not begin with", opened("[]", 0));
    CHECK_THROWS_WITH(Status::format, "does not begin with", opened(" {}", 0));
    CHECK_THROWS_WITH(Status::format, "header: JSON at byte", opened("{} x", 0));
    CHECK_THROWS_WITH(Status::format, "the entry is array, want an object", opened("{\"t\":[]}", 0));
    CHECK_THROWS_WITH(Status::format, "dtype is missing", opened("{\"t\":{\"shape\":[],\"data_offsets\":[0,1]}}", 1));
    CHECK_THROWS_WITH(Status::format, "shape is missing",
                      opened("{\"t\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1));
    CHECK_THROWS_WITH(Status::format, "data_offsets is missing", opened("{\"t\":{\"dtype\":\"U8\",\"shape\":[]}}", 1));
    CHECK_THROWS_WITH(Status::format, "occurs twice",
                      opened("{" + entry("a", "U8", "[1]", 0, 1) + "," + entry("a", "U8", "[1]", 1, 2) + "}", 2));
    CHECK_THROWS_WITH(Status::format, "must not be empty", opened("{" + entry("", "U8", "[1]", 0, 1) + "}", 1));
    CHECK_THROWS_WITH(Status::format, "zero bytes", opened("{" + entry("a\\u0000b", "U8", "[1]", 0, 1) + "}", 1));
    CHECK_THROWS_WITH(Status::format, "__metadata__: found integer", opened("{\"__metadata__\":{\"a\":1}}", 0));
    CHECK_THROWS_WITH(Status::format, "__metadata__: found array", opened("{\"__metadata__\":[]}", 0));
    CHECK_THROWS(Status::format, opened("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0));
}

TEST(the_digest_follows_the_content) {
    ContentDigest known;
    CHECK_EQ(known.hex(), "6c62272e07bb014262b821756295c58d");
    known.add("a", 1);
    CHECK_EQ(known.hex(), "d228cb696f1a8caf78912b704e4a8964");
    ContentDigest word;
    word.add("foobar", 6);
    CHECK_EQ(word.hex(), "343e1662793c64bf6f0d3597ba446f18");

    const ScratchFile scratch(file_bytes(sample_header, sample_data()));
    std::set<std::string> digests = {SafetensorsFile::open(scratch.path())->digest()};
    const ScratchFile copy(file_bytes(sample_header, sample_data()));
    CHECK(!digests.insert(SafetensorsFile::open(copy.path())->digest()).second);
    std::string data = sample_data();
    data.back() ^= 1;
    copy.write(file_bytes(sample_header, data));
    CHECK(digests.insert(SafetensorsFile::open(copy.path())->digest()).second);
    copy.write(file_bytes(sample_header + " ", sample_data()));
    CHECK(digests.insert(SafetensorsFile::open(copy.path())->digest()).second);
}

TEST(damaged_files_never_crash) {
    const std::string good = file_bytes(sample_header, sample_data());
    const ScratchFile scratch(good);
    TestRandom random(99);
    int accepted = 0;
    int refused = 0;
    for (int round = 0; round < 6000; ++round) {
        scratch.write(damaged(good, random));
        try {
            const auto file = SafetensorsFile::open(scratch.path());
            uint64_t sum = file->digest().size();
            for (const SafetensorsFile::Tensor & tensor : file->tensors()) {
                for (uint64_t i = 0; i < tensor.nbytes; ++i) {
                    sum += tensor.data[i];
                }
                CHECK(file->find(tensor.name) == &tensor);
            }
            CHECK(sum > 0);
            ++accepted;
        } catch (const Error & error) {
            CHECK(error.what()[0] != '\0' && std::strchr(error.what(), '\n') == nullptr);
            ++refused;
        }
    }
    CHECK(accepted > 100);
    CHECK(refused > 1000);
}
