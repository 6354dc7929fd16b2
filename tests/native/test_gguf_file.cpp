#include "check.hpp"

#include <set>

#include <sys/stat.h>

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

std::shared_ptr<const GgufFile> opened_with_tensor(const TensorEntry & tensor) {
    GgufBytes file = sample_gguf();
    file.tensors.push_back(tensor);
    file.data.resize(4096);
    return opened(file);
}

constexpr uint64_t past_end = 352; // first aligned offset behind the sample's tensors

} // namespace

TEST(tensors_point_into_the_file) {
    const GgufBytes bytes = sample_gguf();
    const auto file = opened(bytes);
    REQUIRE(file->tensors().size() == 4);
    const uint64_t start = bytes.bytes().size() - bytes.data.size();
    for (size_t i = 0; i < 4; ++i) {
        const GgufTensorInfo & tensor = file->tensors()[i];
        const TensorEntry & entry = bytes.tensors[i];
        CHECK_EQ(tensor.name, entry.name);
        CHECK_EQ(tensor.offset, start + entry.offset);
        CHECK_EQ(static_cast<size_t>(tensor.n_dims), entry.ne.size());
        CHECK_EQ(tensor.split_index, 0);
        CHECK(tensor.data == tensor.file->data() + tensor.offset);
        CHECK(std::memcmp(tensor.data, bytes.data.data() + entry.offset, tensor.nbytes) == 0);
        CHECK(file->find_tensor(entry.name) == &tensor);
        CHECK_EQ(tensor.nbytes, ggml_row_size(tensor.type, tensor.ne[0]) *
                                    static_cast<uint64_t>(tensor.ne[1] * tensor.ne[2] * tensor.ne[3]));
    }
    CHECK_EQ(file->tensors()[2].nbytes, 68u);
    CHECK_EQ(file->tensors()[1].ne[1], 1);
    CHECK(file->find_tensor("a.weigh") == nullptr);
}

TEST(the_map_outlives_the_file_object) {
    GgufTensorInfo tensor;
    {
        tensor = *opened(sample_gguf())->find_tensor("a.weight");
    }
    CHECK_EQ(static_cast<int>(tensor.data[1]), 8);
}

TEST(versions) {
    GgufBytes file = sample_gguf();
    file.version = 2;
    CHECK_EQ(opened(file)->version(), 2u);
    for (const uint32_t version : {0u, 4u, 0x10003u}) {
        file.version = version;
        CHECK_THROWS_WITH(Status::unsupported, "want 2 or 3", opened(file));
    }
    file.version = 1;
    CHECK_THROWS_WITH(Status::unsupported, "convert the model again", opened(file));
    file.version = 0x03000000;
    CHECK_THROWS_WITH(Status::unsupported, "big-endian", opened(file));
    file.version = 3;
    file.magic = "GGML";
    CHECK_THROWS_WITH(Status::format, "begins with \"GGML\"", opened(file));
    file.magic = std::string("\0\n\xff'", 4);
    CHECK_THROWS_WITH(Status::format, "\"\\x00\\x0a\\xff'\"", opened(file));
}

TEST(every_shorter_file_is_refused) {
    const std::string bytes = sample_gguf().bytes();
    const ScratchFile scratch(bytes);
    CHECK(GgufFile::open(scratch.path()) != nullptr);
    for (size_t size = bytes.size(); size > 0; --size) {
        std::filesystem::resize_file(scratch.path(), size - 1);
        CHECK_THROWS(Status::format, GgufFile::open(scratch.path()));
    }
}

TEST(counts_without_bytes_behind_them) {
    for (const uint64_t claim : {1ull << 20, 1ull << 31, 1ull << 61, 1ull << 63, ~0ull - 100}) {
        GgufBytes file = sample_gguf();
        file.extra_keys = static_cast<int64_t>(claim);
        const ScratchFile keys(file.bytes());
        CHECK(fenced_status(0, [&] { GgufFile::open(keys.path()); }) == Status::format);
        file = sample_gguf();
        file.extra_tensors = static_cast<int64_t>(claim);
        const ScratchFile tensors(file.bytes());
        CHECK(fenced_status(0, [&] { GgufFile::open(tensors.path()); }) == Status::format);
        for (const GgufType type : {GgufType::string, GgufType::u8, GgufType::u16, GgufType::f32, GgufType::u64}) {
            file = sample_gguf();
            file.keys.push_back(gguf_array("bomb", type, claim, ""));
            const ScratchFile array(file.bytes());
            CHECK(fenced_status(0, [&] { GgufFile::open(array.path()); }) == Status::format);
        }
        file = sample_gguf();
        file.keys.push_back(gguf_key("bomb", GgufType::string, bytes_of<uint64_t>(claim)));
        const ScratchFile text(file.bytes());
        CHECK(fenced_status(0, [&] { GgufFile::open(text.path()); }) == Status::format);
    }
    GgufBytes few = sample_gguf();
    few.extra_keys = 60000;
    CHECK_THROWS_WITH(Status::format, "the header claims 60019 keys", opened(few));
    few = sample_gguf();
    few.extra_tensors = 130000;
    CHECK_THROWS_WITH(Status::format, "the header claims 130004 tensors", opened(few));
    GgufBytes one_more = sample_gguf();
    one_more.extra_keys = 1;
    CHECK_THROWS(Status::format, opened(one_more));
    one_more = sample_gguf();
    one_more.extra_tensors = 1;
    CHECK_THROWS(Status::format, opened(one_more));
}

TEST(counts_with_bytes_behind_them_stay_small) {
    GgufBytes file;
    for (uint64_t i = 0; i < GgufFile::max_keys; ++i) {
        file.keys.push_back(gguf_key(format("%07llu", static_cast<unsigned long long>(i)), GgufType::u8, "x"));
    }
    CHECK_EQ(opened(file)->values().size(), GgufFile::max_keys);
    file.keys.push_back(gguf_key("one more", GgufType::u8, "x"));
    const ScratchFile keys(file.bytes());
    CHECK(fenced_status(file.bytes().size(), [&] { GgufFile::open(keys.path()); }) == Status::format);
    file = GgufBytes();
    for (uint64_t i = 0; i < GgufFile::max_tensors; ++i) {
        file.tensors.push_back({format("%063llu", static_cast<unsigned long long>(i)), {1}, GGML_TYPE_F32, i * 32});
    }
    file.data.resize(GgufFile::max_tensors * 32);
    CHECK_EQ(opened(file)->tensors().size(), GgufFile::max_tensors);
    file.data.resize(GgufFile::max_tensors * 32 - 32); // the last tensor does not fit
    const ScratchFile tensors(file.bytes());
    CHECK(fenced_status(file.bytes().size(), [&] { GgufFile::open(tensors.path()); }) == Status::format);
    file.tensors.push_back({"one more", {1}, GGML_TYPE_F32, 0});
    CHECK_THROWS_WITH(Status::format, "131073 tensors", opened(file));
    file = GgufBytes();
    const uint64_t n_strings = 4000000;
    file.keys = {gguf_array("tokens", GgufType::string, n_strings, std::string(n_strings * 8, '\0')), "nothing"};
    const ScratchFile strings(file.bytes());
    CHECK(fenced_status(file.bytes().size(), [&] { GgufFile::open(strings.path()); }) == Status::format);
    file = GgufBytes();
    for (int i = 0; i < 300; ++i) {
        file.keys.push_back(gguf_key(std::string(65000, 'k') + std::to_string(i), GgufType::u8, "x"));
    }
    const ScratchFile long_keys(file.bytes());
    CHECK(fenced_status(file.bytes().size(), [&] { GgufFile::open(long_keys.path()); }) == Status::format);
}

TEST(a_value_may_end_with_the_file) {
    GgufBytes file;
    file.alignment = 0;
    file.keys = {gguf_array("n", GgufType::u16, 3, "aabbcc")};
    CHECK_EQ(opened(file)->find("n")->payload_bytes, 6u);
    file.keys = {gguf_array("n", GgufType::string, 2, gguf_text("") + gguf_text("end"))};
    CHECK_EQ(opened(file)->string_at(*opened(file)->find("n"), 1), "end");
    file.keys = {gguf_array("n", GgufType::u16, 3, "aabbc")};
    CHECK_THROWS_WITH(Status::format, "do not fit the 5 bytes left", opened(file));
}

TEST(bad_keys_are_refused) {
    CHECK_THROWS_WITH(Status::format, "key name is empty", opened_with_key(gguf_u32("", 1)));
    CHECK_THROWS_WITH(Status::format, "\"flag\" occurs twice", opened_with_key(gguf_u32("flag", 1)));
    CHECK_THROWS_WITH(Status::format, "\"a\\x00b\"", opened_with_key(gguf_u32(std::string("a\0b", 3), 1)));
    CHECK_THROWS_WITH(Status::format, "UTF-8", opened_with_key(gguf_u32("\xc0\x80", 1)));
    CHECK_THROWS_WITH(Status::format, "65536 bytes", opened_with_key(gguf_u32(std::string(65536, 'k'), 1)));
    CHECK(opened_with_key(gguf_u32(std::string(65535, 'k'), 1))->find(std::string(65535, 'k')) != nullptr);
    CHECK_THROWS_WITH(Status::format, "value type is 13",
                      opened_with_key(gguf_key("k", static_cast<GgufType>(13), "")));
    CHECK_THROWS_WITH(Status::format, "element type is 4294967295",
                      opened_with_key(gguf_array("k", static_cast<GgufType>(~0u), 1, "xxxx")));
    CHECK_THROWS_WITH(Status::format, "arrays of arrays",
                      opened_with_key(gguf_array("k", GgufType::array, 1, bytes_of<uint32_t>(0))));
    CHECK_THROWS_WITH(Status::format, "stored as 2", opened_with_key(gguf_key("k", GgufType::boolean, "\2")));
    CHECK_THROWS_WITH(Status::format, "stored as 255",
                      opened_with_key(gguf_array("k", GgufType::boolean, 2, "\1\xff")));
    CHECK_THROWS_WITH(Status::format, "general.architecture", opened(GgufBytes())->architecture());
}

TEST(alignments) {
    for (const uint32_t bad : {0u, 1u, 3u, 4u, 24u, 33u, 0x80000000u, 0xffffffffu}) {
        GgufBytes file = sample_gguf();
        file.keys[1] = gguf_u32("general.alignment", bad);
        CHECK_THROWS_WITH(Status::format, "want a power of two from 8", opened(file));
    }
    GgufBytes file = sample_gguf();
    file.keys[1] = gguf_string("general.alignment", "32");
    CHECK_THROWS_WITH(Status::format, "has type string, want u32", opened(file));
    file.keys[1] = gguf_u32("general.alignment", 64);
    file.alignment = 64;
    CHECK_THROWS_WITH(Status::format, "\"c.weight\": data offset 96, want a multiple of 64", opened(file));
    file.keys[1] = gguf_u32("general.alignment", 8);
    file.alignment = 8;
    const auto small = opened(file);
    CHECK_EQ(static_cast<int>(small->find_tensor("a.weight")->data[0]), 1);
}

TEST(bad_shapes_are_refused) {
    CHECK_THROWS_WITH(Status::format, "0 dimensions", opened_with_tensor({"t", {}, 0, past_end}));
    CHECK_THROWS_WITH(Status::format, "5 dimensions", opened_with_tensor({"t", {1, 1, 1, 1, 1}, 0, past_end}));
    CHECK_THROWS_WITH(Status::format, "dimension 1 is 0", opened_with_tensor({"t", {4, 0}, 0, past_end}));
    CHECK_THROWS(Status::format, opened_with_tensor({"t", {1ull << 63}, 0, past_end}));
    CHECK_THROWS(Status::format, opened_with_tensor({"t", {~0ull}, 0, past_end}));
    CHECK_THROWS_WITH(Status::format, "product", opened_with_tensor({"t", {1ull << 32, 1ull << 32}, 0, past_end}));
    CHECK_THROWS_WITH(Status::format, "product",
                      opened_with_tensor({"t", {1ull << 16, 1ull << 16, 1ull << 16, 1ull << 16}, 0, past_end}));
    CHECK_THROWS_WITH(Status::format, "overflow 64 bits", opened_with_tensor({"t", {1ull << 62}, 0, past_end}));
    CHECK_THROWS_WITH(Status::format, "do not fit the file", opened_with_tensor({"t", {1ull << 60}, 0, past_end}));
    CHECK_THROWS_WITH(Status::format, "want a multiple of 32 for q8_0",
                      opened_with_tensor({"t", {33}, GGML_TYPE_Q8_0, past_end}));
    CHECK_THROWS_WITH(Status::format, "want a multiple of 256 for q4_K",
                      opened_with_tensor({"t", {32, 8}, GGML_TYPE_Q4_K, past_end}));
}

TEST(tensor_types) {
    for (const uint32_t id : {4u, 5u, 31u, 32u, 33u, 36u, 37u, 38u, static_cast<uint32_t>(GGML_TYPE_COUNT), 1000u,
                              0x80000000u, 0xffffffffu}) {
        const std::string message = "\"t\" has type number " + std::to_string(id);
        CHECK_THROWS_WITH(Status::unsupported, message.c_str(), opened_with_tensor({"t", {256}, id, past_end}));
    }
    for (const uint32_t id : {0u, 1u, 2u, 8u, 10u, 14u, 20u, 23u, 27u, 30u, 39u}) {
        CHECK(opened_with_tensor({"t", {256}, id, past_end})->find_tensor("t")->nbytes > 0);
    }
}

TEST(bad_offsets_are_refused) {
    CHECK_THROWS_WITH(Status::format, "want a multiple of 32", opened_with_tensor({"t", {4}, 0, past_end + 1}));
    CHECK_THROWS_WITH(Status::format, "do not fit the file", opened_with_tensor({"t", {4}, 0, 4096}));
    CHECK_THROWS_WITH(Status::format, "do not fit the file", opened_with_tensor({"t", {9}, 0, 4064}));
    CHECK(opened_with_tensor({"t", {8}, 0, 4064})->find_tensor("t") != nullptr);
    CHECK_THROWS_WITH(Status::format, "do not fit the file", opened_with_tensor({"t", {4}, 0, ~0ull - 31}));
    CHECK_THROWS_WITH(Status::format, "\"a.weight\" and \"t\" overlap", opened_with_tensor({"t", {1}, 0, 32}));
    CHECK_THROWS_WITH(Status::format, "overlap", opened_with_tensor({"t", {1}, 0, 0}));
    CHECK_THROWS_WITH(Status::format, "overlap", opened_with_tensor({"t", {256}, GGML_TYPE_Q4_K, 192}));
    CHECK_THROWS_WITH(Status::format, "\"a.weight\" occurs twice", opened_with_tensor({"a.weight", {1}, 0, past_end}));
    CHECK_THROWS_WITH(Status::format, "tensor name is empty", opened_with_tensor({"", {1}, 0, past_end}));
    CHECK_THROWS_WITH(Status::format, "64 bytes", opened_with_tensor({std::string(64, 't'), {1}, 0, past_end}));
    CHECK(opened_with_tensor({std::string(63, 't'), {1}, 0, past_end}) != nullptr);
}

TEST(bytes_behind_and_between_tensors_are_allowed) {
    GgufBytes file = sample_gguf();
    file.data += std::string(1000, 'z');
    CHECK_EQ(opened(file)->tensors().size(), 4u);
    file.tensors.erase(file.tensors.begin() + 1);
    CHECK_EQ(opened(file)->tensors().size(), 3u);
    file.tensors = {{"first", {32}, GGML_TYPE_I8, 0}, {"second", {1}, GGML_TYPE_I8, 32}}; // not a byte between them
    CHECK_EQ(opened(file)->tensors().size(), 2u);
    file.tensors.clear();
    file.data.clear();
    file.alignment = 0;
    CHECK(opened(file)->tensors().empty());
}

TEST(files_that_are_no_files) {
    const ScratchFile empty("");
    CHECK_THROWS_WITH(Status::format, "empty", GgufFile::open(empty.path()));
    CHECK_THROWS_WITH(Status::not_found, "cannot be opened", GgufFile::open(empty.folder() + "/gone.gguf"));
    CHECK_THROWS_WITH(Status::not_found, "not a regular file", GgufFile::open(empty.folder()));
    CHECK_THROWS(Status::not_found, GgufFile::open(""));
    CHECK_THROWS(Status::invalid, GgufFile::open(std::string("a\0b", 3)));
    const std::string pipe = empty.folder() + "/pipe";
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    CHECK_THROWS_WITH(Status::not_found, "not a regular file", GgufFile::open(pipe));
}

TEST(messages_are_one_line_whatever_the_file_holds) {
    GgufBytes file = sample_gguf();
    file.keys.push_back(gguf_u32(std::string("two\nlines\x1b[31m") + std::string(5000, '\t'), 1));
    file.keys.push_back(file.keys.back());
    try {
        opened(file);
        CHECK(false);
    } catch (const Error & error) {
        const std::string text = error.what();
        CHECK(text.find('\n') == std::string::npos && text.find('\x1b') == std::string::npos);
        CHECK(text.find("two\\x0alines\\x1b[31m") != std::string::npos);
        CHECK(text.size() < 1000);
    }
}

TEST(the_digest_follows_the_content) {
    const GgufBytes sample = sample_gguf();
    const std::string digest = opened(sample)->digest();
    CHECK_EQ(digest.size(), 32u);
    CHECK_EQ(digest.find_first_not_of("0123456789abcdef"), std::string::npos);
    std::set<std::string> digests = {digest};
    CHECK_EQ(opened(sample)->digest(), digest); // another path
    for (const size_t byte : {size_t{0}, size_t{47}, size_t{64}, sample.data.size() - 1}) {
        GgufBytes file = sample;
        file.data[byte] ^= 1;
        CHECK(digests.insert(opened(file)->digest()).second);
    }
    GgufBytes file = sample;
    file.keys[2] = gguf_key("n.u8", GgufType::u8, bytes_of<uint8_t>(201));
    CHECK(digests.insert(opened(file)->digest()).second);
    file = sample;
    file.keys[2] = gguf_key("n.u8", GgufType::i8, bytes_of<uint8_t>(200));
    CHECK(digests.insert(opened(file)->digest()).second);
    file = sample;
    file.tensors[0].name = "A.weight";
    CHECK(digests.insert(opened(file)->digest()).second);
    file = sample;
    file.tensors[0].ne = {3, 4};
    CHECK(digests.insert(opened(file)->digest()).second);
    file = sample;
    file.data[60] ^= 1; // padding
    CHECK_EQ(opened(file)->digest(), digest);
    file.tensors = {{"large", {1u << 20}, GGML_TYPE_I8, 0}};
    file.data.assign(1u << 20, 'x');
    digests = {opened(file)->digest()};
    for (const size_t byte : {size_t{0}, size_t{4095}, file.data.size() - 4096, file.data.size() - 1}) {
        GgufBytes other = file;
        other.data[byte] = 'y';
        CHECK(digests.insert(opened(other)->digest()).second);
    }
}

TEST(damaged_files_never_crash) {
    const std::string good = sample_gguf().bytes();
    const ScratchFile scratch(good);
    TestRandom random(20240607);
    int accepted = 0;
    int refused = 0;
    for (int round = 0; round < 6000; ++round) {
        scratch.write(damaged(good, random));
        try {
            const auto file = GgufFile::open(scratch.path());
            uint64_t sum = file->digest().size();
            for (const GgufValue & value : file->values()) {
                for (uint64_t i = 0; i < value.count; ++i) {
                    sum += value.element_type == GgufType::string ? file->string_at(value, i).size()
                                                                  : file->number_at(value, i) > 0.0;
                }
                CHECK(file->find(value.key) == &value);
            }
            for (const GgufTensorInfo & tensor : file->tensors()) {
                sum += tensor.data[0] + tensor.data[tensor.nbytes - 1];
            }
            CHECK(sum > 0);
            ++accepted;
        } catch (const Error & error) {
            CHECK(error.what()[0] != '\0' && std::strchr(error.what(), '\n') == nullptr);
            ++refused;
        }
    }
    CHECK(accepted > 100); // damage to payloads only
    CHECK(refused > 1000);
}
