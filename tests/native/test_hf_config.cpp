#include "check.hpp"

#include "gguf/hf_config.hpp"
#include "scratch_file.hpp"

using namespace dflash;
using namespace dflash::testing;

namespace {

const char * const sample = R"({
    "architectures": ["SampleModel"], "hidden_size": 256, "rms_norm_eps": 1e-06, "sliding_window": null,
    "use_cache": true, "block_size": 8, "model_type": "sample",
    "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
    "dflash_config": {"mask_token_id": 4095, "block_size": 16, "target_layer_ids": [1, 3, 5], "nothing": null}
})";

} // namespace

TEST(keys_reach_into_objects_and_the_first_one_counts) {
    const HfConfig config = HfConfig::parse(sample, "config.json");
    CHECK_EQ(config.require_int({"hidden_size"}, 1, 1000), 256);
    CHECK_EQ(config.require_int({"dflash_config.block_size", "block_size"}, 1, 64), 16);
    CHECK_EQ(config.require_int({"dflash_config.gone", "block_size"}, 1, 64), 8);
    CHECK_EQ(config.int_or({"dflash_config.nothing", "block_size"}, 3, 1, 64), 8);
    CHECK_EQ(config.int_or({"sliding_window"}, -1, 1, 64), -1);
    CHECK_EQ(config.int_or({"gone.deeper", "hidden_size.deeper"}, 5, 1, 64), 5);
    CHECK_EQ(config.require_float({"rope_parameters.rope_theta", "rope_theta"}, 1, 1e9), 1e7);
    CHECK_EQ(config.float_or({"rms_norm_eps"}, 1, 0, 1), 1e-6);
    CHECK_EQ(config.float_or({"hidden_size"}, 1, 0, 1000), 256.0);
    CHECK_EQ(config.float_or({"gone"}, 0.5, 1, 2), 0.5);
    CHECK(config.bool_or({"use_cache"}, false));
    CHECK(!config.bool_or({"gone"}, false));
    CHECK_EQ(config.require_string({"rope_parameters.rope_type"}), "default");
    CHECK_EQ(config.string_or({"gone"}, "else"), "else");
    CHECK_EQ(config.string_or({"model_type"}, "else"), "sample");
    CHECK(config.ints_or({"dflash_config.target_layer_ids"}, {}, 8, 0, 64) == std::vector<int64_t>({1, 3, 5}));
    CHECK(config.ints_or({"gone"}, {9}, 8, 0, 1) == std::vector<int64_t>({9}));
    CHECK(config.strings_or({"architectures"}, {}, 1) == std::vector<std::string>({"SampleModel"}));
    CHECK(config.strings_or({"gone"}, {"x"}, 1) == std::vector<std::string>({"x"}));
    CHECK(config.find({"dflash_config"})->is_object());
    CHECK(config.find({"dflash_config.nothing"}) == nullptr);
    CHECK(config.find({""}) == nullptr && config.find({"."}) == nullptr && config.find({"dflash_config."}) == nullptr);
}

TEST(messages_name_file_and_key) {
    const HfConfig config = HfConfig::parse(sample, "config.json");
    CHECK_THROWS_WITH(Status::format, "config.json: key \"a.b\" or \"b\" is missing, want an integer",
                      config.require_int({"a.b", "b"}, 0, 1));
    CHECK_THROWS_WITH(Status::format, "config.json: key \"hidden_size\": found 256, want 1 to 100",
                      config.int_or({"gone", "hidden_size"}, 0, 1, 100));
    CHECK_THROWS_WITH(Status::format, "found string", config.int_or({"model_type"}, 0, 0, 1));
    CHECK_THROWS_WITH(Status::format, "is missing, want a number", config.require_float({"sliding_window"}, 0, 1));
    CHECK_THROWS_WITH(Status::format, "found 1e+07, want 0 to 1",
                      config.float_or({"rope_parameters.rope_theta"}, 1, 0, 1));
    CHECK_THROWS_WITH(Status::format, "found integer, want bool", config.bool_or({"hidden_size"}, true));
    CHECK_THROWS_WITH(Status::format, "found bool, want a string", config.require_string({"use_cache"}));
    CHECK_THROWS_WITH(Status::format, "is missing, want a string", config.require_string({"gone"}));
    CHECK_THROWS_WITH(Status::format, "3 elements, want at most 2",
                      config.ints_or({"dflash_config.target_layer_ids"}, {}, 2, 0, 64));
    CHECK_THROWS_WITH(Status::format, "found 5, want 0 to 4",
                      config.ints_or({"dflash_config.target_layer_ids"}, {}, 3, 0, 4));
    CHECK_THROWS_WITH(Status::format, "found integer, want a string",
                      config.strings_or({"dflash_config.target_layer_ids"}, {}, 3));
    CHECK_THROWS_WITH(Status::format, "found integer, want an array", config.ints_or({"hidden_size"}, {}, 3, 0, 999));
}

TEST(files) {
    const ScratchFile file(sample, "config.json");
    const HfConfig config = HfConfig::open(file.path());
    CHECK_EQ(config.path(), file.path());
    CHECK_EQ(config.require_int({"hidden_size"}, 256, 256), 256);
    CHECK_THROWS(Status::not_found, HfConfig::open(file.folder() + "/gone.json"));
    CHECK_THROWS_WITH(Status::format, "found array, want a JSON object", HfConfig::parse("[]", "config.json"));
    CHECK_THROWS_WITH(Status::format, "config.json: JSON at byte 1", HfConfig::parse("{", "config.json"));
    const std::string large = std::string(HfConfig::max_bytes, ' ') + "{}";
    CHECK_THROWS_WITH(Status::format, "want at most 4194304", HfConfig::parse(large, "config.json"));
}
