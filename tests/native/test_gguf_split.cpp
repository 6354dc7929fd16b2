#include "check.hpp"

#include "gguf/gguf_file.hpp"
#include "gguf_bytes.hpp"
#include "scratch_file.hpp"

using namespace dflash;
using namespace dflash::testing;

namespace {

GgufBytes part(int number, int count, int n_tensors) {
    GgufBytes file;
    file.keys = {gguf_u16("split.no", static_cast<uint16_t>(number - 1)),
                 gguf_u16("split.count", static_cast<uint16_t>(count)),
                 gguf_key("split.tensors.count", GgufType::i32, bytes_of<int32_t>(n_tensors))};
    return file;
}

/// Three parts that hold the sample's tensors: a and b, none, c and d.
struct SplitSample {
    GgufBytes first = part(1, 3, 4);
    GgufBytes second = part(2, 3, 4);
    GgufBytes third = part(3, 3, 4);

    SplitSample() {
        const GgufBytes whole = sample_gguf();
        first.keys.insert(first.keys.begin(), whole.keys.begin(), whole.keys.end());
        first.tensors = {whole.tensors[0], whole.tensors[1]};
        first.data = whole.data.substr(0, 96);
        third.tensors = {whole.tensors[2], whole.tensors[3]};
        third.tensors[0].offset -= 96;
        third.tensors[1].offset -= 96;
        third.data = whole.data.substr(96);
    }
};

/// Writes the parts and opens the one with that number.
std::shared_ptr<const GgufFile> opened(const SplitSample & sample, int number = 1) {
    const ScratchFile scratch(sample.first.bytes(), "m-00001-of-00003.gguf");
    scratch.add("m-00002-of-00003.gguf", sample.second.bytes());
    scratch.add("m-00003-of-00003.gguf", sample.third.bytes());
    return GgufFile::open(scratch.folder() + "/m-0000" + std::to_string(number) + "-of-00003.gguf");
}

} // namespace

TEST(any_part_opens_the_whole_model) {
    const ScratchFile single(sample_gguf().bytes());
    const auto whole = GgufFile::open(single.path());
    for (const int number : {1, 2, 3}) {
        const auto file = opened(SplitSample(), number);
        CHECK(file->path().find("m-00001-of-00003.gguf") != std::string::npos);
        CHECK_EQ(file->architecture(), "sample");
        CHECK_EQ(file->parts().size(), 3u);
        CHECK_EQ(file->total_bytes(), SplitSample().first.bytes().size() + SplitSample().second.bytes().size() +
                                          SplitSample().third.bytes().size());
        REQUIRE(file->tensors().size() == 4);
        for (size_t i = 0; i < 4; ++i) {
            const GgufTensorInfo & tensor = file->tensors()[i];
            const GgufTensorInfo & same = whole->tensors()[i];
            CHECK_EQ(tensor.name, same.name);
            CHECK_EQ(tensor.nbytes, same.nbytes);
            CHECK_EQ(tensor.split_index, i < 2 ? 0 : 2);
            CHECK(tensor.file == file->parts()[static_cast<size_t>(tensor.split_index)]);
            CHECK(tensor.data == tensor.file->data() + tensor.offset);
            CHECK(std::memcmp(tensor.data, same.data, tensor.nbytes) == 0);
            CHECK(file->find_tensor(tensor.name) == &tensor);
        }
        CHECK_EQ(file->digest(), whole->digest());
    }
}

TEST(parts_that_do_not_belong_together) {
    SplitSample sample;
    sample.second.keys[0] = gguf_u16("split.no", 2);
    CHECK_THROWS_WITH(Status::format, "split.no is 2, want 1", opened(sample));
    sample = SplitSample();
    sample.third.keys[1] = gguf_u16("split.count", 4);
    CHECK_THROWS_WITH(Status::format, "split.count is 4, want 3", opened(sample));
    sample = SplitSample();
    sample.third.keys.erase(sample.third.keys.begin());
    CHECK_THROWS_WITH(Status::format, "\"split.no\" is missing", opened(sample));
    sample = SplitSample();
    sample.third.tensors[0].name = "a.weight";
    CHECK_THROWS_WITH(Status::format, "\"a.weight\" occurs twice", opened(sample));
    sample = SplitSample();
    sample.third.tensors.pop_back();
    CHECK_THROWS_WITH(Status::format, "split.tensors.count is 4, want 3", opened(sample));
    sample = SplitSample();
    sample.first.keys.back() = gguf_string("split.tensors.count", "4");
    CHECK_THROWS_WITH(Status::format, "has type string", opened(sample));
    sample = SplitSample();
    sample.third.data.pop_back();
    CHECK_THROWS_WITH(Status::format, "m-00003-of-00003.gguf: tensor \"d.weight\"", opened(sample));
    sample = SplitSample();
    sample.third.magic = "GGUG";
    CHECK_THROWS_WITH(Status::format, "m-00003-of-00003.gguf", opened(sample));
}

TEST(the_limit_of_tensors_is_one_for_all_parts) {
    SplitSample sample;
    for (GgufBytes * file : {&sample.first, &sample.second}) {
        file->tensors.clear();
        for (uint64_t i = 0; i <= GgufFile::max_tensors / 2; ++i) {
            file->tensors.push_back({format("%d.%llu", file == &sample.first, static_cast<unsigned long long>(i)),
                                     {1},
                                     GGML_TYPE_F32,
                                     i * 32});
        }
        file->data.resize(file->tensors.size() * 32);
    }
    CHECK_THROWS_WITH(Status::format, "m-00002-of-00003.gguf: the parts up to this one hold 131074 tensors",
                      opened(sample));
}

TEST(names_and_counts_must_agree) {
    const SplitSample sample;
    const ScratchFile renamed(sample.first.bytes(), "renamed.gguf");
    CHECK_THROWS_WITH(Status::format, "split.count is 3, but the name says 1 part", GgufFile::open(renamed.path()));
    const ScratchFile whole(sample_gguf().bytes(), "m-00001-of-00002.gguf");
    CHECK_THROWS_WITH(Status::format, "split.count is 1, but the name says 2 part", GgufFile::open(whole.path()));
    const ScratchFile alone(sample.first.bytes(), "m-00001-of-00003.gguf");
    CHECK_THROWS_WITH(Status::not_found, "m-00002-of-00003.gguf", GgufFile::open(alone.path()));
    const ScratchFile last(sample.third.bytes(), "m-00003-of-00003.gguf");
    CHECK_THROWS_WITH(Status::not_found, "m-00001-of-00003.gguf", GgufFile::open(last.path()));
    for (const char * name :
         {"m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-00000.gguf", "m-00001-of-99999.gguf"}) {
        const ScratchFile odd(sample.first.bytes(), name);
        CHECK_THROWS_WITH(Status::format, "the name says part", GgufFile::open(odd.path()));
    }
    for (const char * name : {"m-00001-of-00001.gguf", "m-0001-of-0003.gguf", "m-0000x-of-00003.gguf", "-of-.gguf",
                              "m-00001_of-00003.gguf", "m-00001-of-00003.GGUF"}) {
        const ScratchFile plain(sample_gguf().bytes(), name);
        CHECK_EQ(GgufFile::open(plain.path())->tensors().size(), 4u);
    }
}

TEST(a_count_of_zero_means_not_split) {
    GgufBytes file = sample_gguf();
    file.keys.push_back(gguf_u16("split.count", 0));
    const ScratchFile scratch(file.bytes());
    CHECK_EQ(GgufFile::open(scratch.path())->parts().size(), 1u);
}
