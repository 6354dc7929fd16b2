#pragma once

#include <memory>
#include <vector>

#include "capi/handle.hpp"
#include "engine/decoder.hpp"
#include "engine/draft_forward.hpp"
#include "engine/target_forward.hpp"
#include "gguf/gguf_file.hpp"
#include "model/draft_model.hpp"
#include "model/target_model.hpp"
#include "state/draft_context.hpp"
#include "state/draft_feature_mirror.hpp"
#include "state/prefix_snapshot.hpp"
#include "state/target_cache.hpp"

// The objects behind the opaque handles of dflash.h. Children hold their parents.

struct dflash_gguf : dflash::capi::Handle {
    static constexpr const char * noun = "gguf";
    std::shared_ptr<const dflash::GgufFile> file;
};

struct dflash_target_model : dflash::capi::Handle {
    static constexpr const char * noun = "target_model";
    std::shared_ptr<const dflash::TargetModel> model;
};

struct dflash_target_cache : dflash::capi::Handle {
    static constexpr const char * noun = "target_cache";
    std::unique_ptr<dflash::TargetCache> cache;
    std::unique_ptr<dflash::TargetForward> forward; // uses the cache: destroyed first
    dflash::VerifyOutcome outcome;
    dflash::CancelToken cancel;
};

struct dflash_draft_model : dflash::capi::Handle {
    static constexpr const char * noun = "draft_model";
    std::shared_ptr<const dflash::DraftModel> model;
};

struct dflash_draft_context : dflash::capi::Handle {
    static constexpr const char * noun = "draft_context";
    std::unique_ptr<dflash::DraftContext> context;
    std::unique_ptr<dflash::DraftForward> forward;
};

struct dflash_draft_feature_mirror : dflash::capi::Handle {
    static constexpr const char * noun = "draft_feature_mirror";
    std::unique_ptr<dflash::DraftFeatureMirror> mirror;
};

struct dflash_prefix_snapshot : dflash::capi::Handle {
    static constexpr const char * noun = "prefix_snapshot";
    dflash::SnapshotPtr snapshot;
};

struct dflash_decoder : dflash::capi::Handle {
    static constexpr const char * noun = "decoder";
    std::shared_ptr<dflash_target_cache> cache;
    std::shared_ptr<dflash_draft_context> context;       // may be null
    std::shared_ptr<dflash_draft_feature_mirror> mirror; // may be null
    std::unique_ptr<dflash::Decoder> decoder;            // uses all of the above: destroyed first
    std::vector<dflash::Draw> draws;                     // of the last call
};
